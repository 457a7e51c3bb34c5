"""What the load test's tests share: a scripted server, and runs over hand-made workloads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from steploop.loadtest.http_target import HttpTarget
from steploop.loadtest.open_loop import Limits, RunResult, run_open_loop
from steploop.workload import WorkloadRequest

from .fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """One for each test."""
    server = FakeServer()
    yield server
    server.close()


def run_requests(
    server: FakeServer, requests: Sequence[tuple[float, int, int]], limits: Limits | None = None, **options: Any
) -> RunResult:
    """Sends requests of (arrival time, prompt tokens, output tokens) to a server."""

    async def run() -> RunResult:
        target = HttpTarget(server.url, **options)
        try:
            await target.describe()
            workload = [WorkloadRequest(*request) for request in requests]
            prepared = [target.prepare([1] * request[1], request[2]) for request in requests]
            return await run_open_loop(target, workload, prepared, limits or Limits(timeout=30), stop=asyncio.Event())
        finally:
            await target.close()

    return asyncio.run(run())
