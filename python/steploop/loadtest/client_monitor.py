"""ClientMonitor: whether the load test itself was too slow to be believed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import TracebackType

_PERIOD = 0.02  # seconds
_TICKS_BETWEEN_REPORTS = 10


class ClientMonitor:
    """While it is entered, measures how late the event loop wakes who asked to be woken, and the processor time of
    the loop's thread. The loop's timers alone are up to a millisecond late.

    Args:
        report: Called five times a second, and once more at the end.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self.lags: list[float] = []
        """Seconds, fifty of them a second."""
        self.cpu_share = 0.0
        """Of one core, that the loop's thread took; 0 to 1."""

    async def __aenter__(self) -> ClientMonitor:
        self._started = (time.monotonic(), time.thread_time())
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        wall, cpu = time.monotonic() - self._started[0], time.thread_time() - self._started[1]
        self.cpu_share = cpu / wall if wall > 0 else 0.0
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._report()

    async def _watch(self) -> None:
        while True:
            for _ in range(_TICKS_BETWEEN_REPORTS):
                due = time.monotonic() + _PERIOD
                await asyncio.sleep(_PERIOD)
                self.lags.append(max(0.0, time.monotonic() - due))
            self._report()
