"""Holds Ctrl-C back where an exception between two statements would tear state apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Inside, SIGINT waits; on leaving, its handler runs (and raises KeyboardInterrupt, unless it was replaced).

    Python runs signal handlers in the main thread only, so other threads have nothing to hold back.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):  # ignored, left to the system, or not Python's
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
