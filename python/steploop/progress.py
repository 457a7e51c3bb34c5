"""A progress bar over requests, on standard error when that is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class RequestProgress:
    """Counts finished requests and generated tokens; silent unless `enabled` and standard error is a terminal."""

    def __init__(self, num_requests: int, *, description: str = "Generating", enabled: bool = True) -> None:
        self._num_requests = num_requests
        self._description = description
        self._num_tokens = 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if enabled and sys.stderr.isatty():
            self._bar = _make_bar()

    def __enter__(self) -> RequestProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._num_requests, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, *, num_finished: int, num_tokens: int) -> None:
        """Adds what one step brought."""
        self._num_tokens += num_tokens
        if self._bar is not None:
            rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
            self._bar.update(self._task, advance=num_finished, rate=f"{rate:.0f} tokens/s")


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
    )
