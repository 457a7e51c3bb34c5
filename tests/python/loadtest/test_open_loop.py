"""The open loop tells the truth: nothing that delays a request is left out of its latency."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from steploop.loadtest.figures import summarize_run
from steploop.loadtest.open_loop import Limits, RunResult, run_open_loop
from steploop.loadtest.record import Arrival, RequestFailure, RequestRecord
from steploop.loadtest.target import TargetFigures
from steploop.workload import WorkloadRequest

from .conftest import run_requests
from .fake_server import FakeServer, answer

ARRIVALS = [index * 0.05 for index in range(20)]  # over a second


class FakeTarget:
    """Answers each request after its time, with one token."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.in_flight = self.max_in_flight = 0

    def prepare(self, prompt: Any, num_output_tokens: int) -> Any:
        return None

    async def send(self, prepared: Any, record: RequestRecord) -> None:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.seconds)
            record.arrivals.append(Arrival(time.monotonic(), 1))
            record.num_output_tokens = 1
        finally:
            self.in_flight -= 1

    async def begin(self) -> None:
        pass

    async def end(self) -> TargetFigures:
        return TargetFigures()

    async def close(self) -> None:
        pass


def run(target: Any, arrivals: list[float], limits: Limits | None = None, stop_after: float | None = None) -> RunResult:
    async def go() -> RunResult:
        stop = asyncio.Event()
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stop.set)
        requests = [WorkloadRequest(arrival, 1, 1) for arrival in arrivals]
        return await run_open_loop(target, requests, [None] * len(requests), limits or Limits(), stop=stop)

    return asyncio.run(go())


def test_every_request_is_sent_when_due_however_slow_the_answers() -> None:
    target = FakeTarget(1.0)
    result = run(target, ARRIVALS)
    assert [record.due_time - result.start_time for record in result.records] == pytest.approx(ARRIVALS)
    assert all(record.sent_time is not None and record.sent_time >= record.due_time for record in result.records)
    assert target.max_in_flight > 10  # a client that waits for answers has one
    assert not result.interrupted
    assert result.duration >= 1.95


def test_a_stall_is_in_the_latency_of_every_request_due_meanwhile(server: FakeServer) -> None:
    """The server does nothing at all for a second, from the first request on: it does not even accept."""
    stalled = False

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal stalled
        if not stalled:
            stalled = True
            time.sleep(1.0)
        return await answer()(request, body)

    server.script = script
    result = run_requests(server, [(arrival, 1, 2) for arrival in ARRIVALS])
    for record, arrival in zip(result.records, ARRIVALS, strict=True):
        assert record.state == "completed"
        assert record.ttft is not None and record.e2e is not None
        assert record.e2e >= record.ttft >= 1.0 - arrival
    assert summarize_run(result, None, 0)["latencies"]["ttft"]["p50"] >= 0.5


def test_a_stall_of_the_client_counts_and_is_reported() -> None:
    class Stalling(FakeTarget):
        async def send(self, prepared: Any, record: RequestRecord) -> None:
            if record.index == 0:
                time.sleep(1.0)  # the client's own event loop
            await super().send(prepared, record)

    result = run(Stalling(0.001), ARRIVALS)
    for record, arrival in zip(result.records, ARRIVALS, strict=True):
        assert record.ttft is not None and record.ttft >= 1.0 - arrival
    figures = summarize_run(result, None, 0)
    assert figures["client"]["lateness"]["p99"] > 0.5
    assert figures["client"]["loop_lag"]["max"] > 0.5
    assert any("this client could not keep up" in warning for warning in figures["warnings"])


def test_a_busy_client_is_reported() -> None:
    class Busy(FakeTarget):
        async def send(self, prepared: Any, record: RequestRecord) -> None:
            ends_at = time.thread_time() + 0.2
            while time.thread_time() < ends_at:
                pass
            await super().send(prepared, record)

    figures = summarize_run(run(Busy(), [0.0] * 5), None, 0)
    assert figures["client"]["cpu_share"] > 0.2
    assert figures["client"]["lateness"]["max"] >= 0.7


def test_the_wait_for_the_limit_counts() -> None:
    target = FakeTarget(0.1)
    result = run(target, [0.0] * 10, Limits(max_concurrency=2))
    assert target.max_in_flight == 2
    # Two at a time: the last two begin after four others.
    assert sorted(record.e2e or 0 for record in result.records)[-1] >= 0.5
    figures = summarize_run(result, None, 0)
    assert figures["latencies"]["e2e"]["max"] >= 0.5
    assert figures["client"]["concurrency_wait"]["max"] >= 0.4
    assert figures["in_flight"]["max"] == 2


def test_timeouts_count_from_the_sending() -> None:
    result = run(FakeTarget(60), [0.0, 0.1], Limits(timeout=0.3))
    assert [record.error for record in result.records] == ["timeout"] * 2
    assert all(record.e2e is not None and record.e2e >= 0.3 for record in result.records)


def test_stopped() -> None:
    class Mixed(FakeTarget):
        async def send(self, prepared: Any, record: RequestRecord) -> None:
            if record.index == 1:
                raise RequestFailure("broken", "it is broken")
            self.seconds = 0.0 if record.index == 0 else 60.0
            await super().send(prepared, record)

    result = run(Mixed(), [0.0, 0.0, 0.0, 60.0], stop_after=0.5)
    assert result.interrupted
    assert [record.state for record in result.records] == ["completed", "failed", "unfinished", "not_sent"]
    assert 0.5 <= result.duration < 50
    figures = summarize_run(result, None, 0)
    assert figures["incomplete"]
    assert figures["requests"] == {"asked": 4, "completed": 1, "failed": 1, "unfinished": 1, "not_sent": 1}
    assert figures["latencies"]["ttft"]["num_missing"] == 3
    assert "the run was interrupted: 1 requests were in flight, 1 not yet sent" in figures["warnings"][0]


def test_progress_is_reported() -> None:
    reports: list[tuple[int, int]] = []

    async def go() -> None:
        requests = [WorkloadRequest(arrival, 1, 1) for arrival in ARRIVALS]
        prepared = [None] * len(requests)
        await run_open_loop(
            FakeTarget(),
            requests,
            prepared,
            Limits(),
            stop=asyncio.Event(),
            report=lambda *report: reports.append(report),
        )

    asyncio.run(go())
    assert len(reports) > 1
    assert [sum(column) for column in zip(*reports, strict=True)] == [20, 20]


def test_a_bug_is_not_a_failed_request() -> None:
    class Broken(FakeTarget):
        async def send(self, prepared: Any, record: RequestRecord) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Broken(), [0.0])
