"""A progress bar over requests, on standard error when that is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class RequestProgress:
    """Counts finished requests and generated tokens; silent unless `enabled` and standard error is a terminal.

    Args:
        num_requests: All of them; None: nobody knows how many there will be.
        num_finished: Those that were finished before.
        amount: How much there is to do; the time that remains is told by the share that is done. Default: the requests.
    """

    def __init__(
        self,
        num_requests: int | None,
        *,
        description: str = "Generating",
        enabled: bool = True,
        num_finished: int = 0,
        amount: int | None = None,
    ) -> None:
        self._num_requests = num_requests
        self._num_finished = num_finished
        self._description = description
        if amount is None and num_requests is not None:
            amount = num_requests - num_finished
        self._amount = amount
        self._num_tokens = 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if enabled and sys.stderr.isatty():
            self._bar = _make_bar()

    def __enter__(self) -> RequestProgress:
        self._started = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._amount, count=self._count(), rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, *, num_finished: int, num_tokens: int, amount: int | None = None) -> None:
        """Adds what one step brought.

        Args:
            amount: What has been done of that of the constructor. Default: the requests.
        """
        self._num_finished += num_finished
        self._num_tokens += num_tokens
        if self._bar is not None:
            rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
            advance = num_finished if amount is None else amount
            text = f"{rate:.0f} tokens/s" if self._num_tokens else ""
            self._bar.update(self._task, advance=advance, count=self._count(), rate=text)

    def _count(self) -> str:
        return f"{self._num_finished}" if self._num_requests is None else f"{self._num_finished}/{self._num_requests}"


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
    )
