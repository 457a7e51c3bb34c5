"""The open loop: every request is sent when it is due, however many are in flight and however slow the answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from steploop.loadtest.client_monitor import ClientMonitor
from steploop.loadtest.record import RequestFailure, RequestRecord
from steploop.loadtest.target import Target, TargetFigures
from steploop.workload import WorkloadRequest


@dataclass
class RunResult:
    """What a run brought. Times are seconds on the clock of `time.monotonic()`."""

    records: list[RequestRecord]
    start_time: float
    """When the first request was due."""
    end_time: float
    """When the last answer ended, or the run was interrupted."""
    interrupted: bool
    lags: list[float]
    """See ClientMonitor."""
    cpu_share: float
    target: TargetFigures

    @property
    def duration(self) -> float:
        """Seconds, > 0."""
        return max(self.end_time - self.start_time, 1e-9)


@dataclass(frozen=True)
class Limits:
    """What keeps requests from being sent or from going on."""

    max_concurrency: int | None = None
    """Most requests in flight; others wait, which counts in their latencies. None: no limit."""
    timeout: float | None = None
    """Seconds that a request may take from when it is sent. None: no limit."""


async def run_open_loop(
    target: Target,
    requests: Sequence[WorkloadRequest],
    prepared: Sequence[Any],
    limits: Limits,
    *,
    stop: asyncio.Event,
    report: Callable[[int, int], None] = lambda num_ended, num_tokens: None,
) -> RunResult:
    """Sends requests and waits for all answers.

    Args:
        prepared: What `target.prepare` made of each.
        stop: Ends the run early; what is in flight is given up.
        report: Told now and then how many requests have ended since it was last told, and how many tokens they had.
    """
    await target.begin()
    start_time = time.monotonic()
    records = [
        RequestRecord(index, start_time + request.arrival_time, request.num_prompt_tokens, request.num_output_tokens)
        for index, request in enumerate(requests)
    ]
    sender = _Sender(target, limits, report)
    async with ClientMonitor(sender.report) as monitor:
        interrupted = await unless_stopped(stop, sender.send_all(records, prepared))
    # Before the target is asked, which takes a while.
    stopped_time = time.monotonic()
    ends = [record.end_time for record in records if record.end_time is not None]
    return RunResult(
        records=records,
        start_time=start_time,
        end_time=stopped_time if interrupted else max(ends, default=stopped_time),
        interrupted=interrupted,
        lags=monitor.lags,
        cpu_share=monitor.cpu_share,
        target=await target.end(),
    )


class _Sender:
    def __init__(self, target: Target, limits: Limits, report: Callable[[int, int], None]) -> None:
        self._target = target
        self._timeout = limits.timeout
        self._slots: contextlib.AbstractAsyncContextManager[Any] = (
            contextlib.nullcontext() if limits.max_concurrency is None else asyncio.Semaphore(limits.max_concurrency)
        )
        self._report = report
        self._num_ended = self._num_tokens = 0  # since the last report

    async def send_all(self, records: Sequence[RequestRecord], prepared: Sequence[Any]) -> None:
        """Ends when every request has. Cancelled, it gives up what is in flight."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for record, of_record in zip(records, prepared, strict=True):
                if (delay := record.due_time - time.monotonic()) > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(self._send(record, of_record)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def report(self) -> None:
        """Passes on what has ended."""
        self._report(self._num_ended, self._num_tokens)
        self._num_ended = self._num_tokens = 0

    async def _send(self, record: RequestRecord, prepared: Any) -> None:
        record.started_time = time.monotonic()
        async with self._slots:
            record.sent_time = time.monotonic()
            try:
                await asyncio.wait_for(self._target.send(prepared, record), self._timeout)
            except RequestFailure as failure:
                record.error, record.error_detail = failure.kind, str(failure)
            except asyncio.TimeoutError:
                record.error, record.error_detail = "timeout", f"not over {self._timeout:g} s after it was sent"
            if record.end_time is None or record.error is not None:
                record.end_time = time.monotonic()
        self._num_ended += 1
        self._num_tokens += record.num_output_tokens_known


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work, or gives it up once `stop` is set; whether it was given up."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return False
        return True
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
