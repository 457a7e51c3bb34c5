"""An engine in process as the target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steploop import AsyncLLMEngine
from steploop.loadtest.engine_target import EngineTarget
from steploop.loadtest.figures import summarize_run
from steploop.loadtest.open_loop import Limits, RunResult, run_open_loop
from steploop.workload import PromptMaker, WorkloadRequest


@pytest.fixture
def make_target(tiny_llama: Path) -> Iterator[Callable[..., EngineTarget]]:
    """Makes targets whose engines are closed after the test."""
    engines: list[AsyncLLMEngine] = []

    def make(**settings: Any) -> EngineTarget:
        defaults = {"max_num_seqs": 4, "num_kv_blocks": 128, "num_threads": 1, "max_model_len": 256}
        engines.append(AsyncLLMEngine(model=tiny_llama, **{**defaults, **settings}))
        return EngineTarget(engines[-1])

    yield make
    for engine in engines:
        engine.close()


def run(target: EngineTarget, requests: list[tuple[float, int, int]], limits: Limits | None = None) -> RunResult:
    async def go() -> RunResult:
        maker = PromptMaker(0, vocab_size=target.describe().vocab_size)
        prepared = [
            target.prepare(maker.token_ids(index, request[1]), request[2]) for index, request in enumerate(requests)
        ]
        workload = [WorkloadRequest(*request) for request in requests]
        return await run_open_loop(target, workload, prepared, limits or Limits(), stop=asyncio.Event())

    return asyncio.run(go())


def test_every_token_is_counted(make_target: Callable[..., EngineTarget]) -> None:
    requests = [(index * 0.01, 5 + index, 1 + index) for index in range(12)]
    result = run(make_target(), requests)
    for record, (_, num_prompt, num_output) in zip(result.records, requests, strict=True):
        assert record.state == "completed"
        assert (record.num_prompt_tokens, record.num_output_tokens) == (num_prompt, num_output)
        assert sum(arrival.amount for arrival in record.arrivals) == num_output
        assert record.queue_time is not None and record.ttft is not None
        assert 0 <= record.queue_time <= record.ttft
    figures = summarize_run(result, {"e2e": 1000.0}, 0)
    assert figures["goodput"]["num_good"] == 12
    assert figures["queue_time"]["count"] == 12
    assert figures["queue_time"]["source"] == "RequestOutput.metrics"
    steps = figures["steps"]
    assert steps["num_lost"] == 0
    assert 1 <= steps["mean_scheduled"] <= steps["max_scheduled"] <= 4
    assert result.target.iterations is not None
    num_generated = sum(iteration["num_generation_tokens"] for iteration in result.target.iterations)
    assert num_generated >= sum(request[2] - 1 for request in requests)


def test_runs_do_not_see_each_others_steps(make_target: Callable[..., EngineTarget]) -> None:
    target = make_target()
    first, second = run(target, [(0.0, 5, 20)]), run(target, [(0.0, 5, 3)])
    assert first.target.iterations and second.target.iterations
    assert len(second.target.iterations) <= 4
    assert first.target.iterations[-1]["iteration"] < second.target.iterations[0]["iteration"]


def test_refused_and_timed_out(make_target: Callable[..., EngineTarget]) -> None:
    """One is too long, the others not; what times out is aborted."""
    target = make_target()
    result = run(target, [(0.0, 5, 3), (0.0, 500, 3), (0.0, 5, 3)])
    assert [record.error for record in result.records] == [None, "RequestTooLongError", None]
    step = target._engine.engine.step

    def slow_step() -> Any:
        import time

        time.sleep(0.05)
        return step()

    target._engine.engine.step = slow_step  # type: ignore[method-assign]
    result = run(target, [(0.0, 5, 200)], Limits(timeout=0.5))
    assert [record.error for record in result.records] == ["timeout"]
    for _ in range(1000):
        if not target._engine.engine.unfinished_request_ids():
            break
        asyncio.run(asyncio.sleep(0.01))
    assert not target._engine.engine.unfinished_request_ids()


def test_truncated_at_the_models_limit(make_target: Callable[..., EngineTarget]) -> None:
    figures = summarize_run(run(make_target(), [(0.0, 250, 40)]), None, 0)
    assert figures["lengths"]["num_truncated"] == 1
    assert any("fewer tokens than asked" in warning for warning in figures["warnings"])


def test_lost_steps_are_counted(make_target: Callable[..., EngineTarget]) -> None:
    result = run(make_target(iteration_stats_capacity=2), [(0.0, 5, 20)])
    assert result.target.iterations is not None
    assert len(result.target.iterations) + result.target.num_iterations_lost >= 20
    assert any("steps are missing" in warning for warning in summarize_run(result, None, 0)["warnings"])


def test_a_dead_engine_fails_its_requests(make_target: Callable[..., EngineTarget]) -> None:
    target = make_target()
    target._engine.close()

    async def go() -> Any:
        from steploop.loadtest.record import RequestFailure, RequestRecord

        with pytest.raises(RequestFailure) as caught:
            await target.send(target.prepare([1, 2], 2), RequestRecord(0, 0.0, 2, 2))
        return caught.value.kind

    assert asyncio.run(go()) == "EngineDeadError"
