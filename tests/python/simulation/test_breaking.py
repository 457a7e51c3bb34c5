"""explain: a case for each cause that it tells apart, just above the largest rate that is good."""

from __future__ import annotations

from typing import Any

import pytest

from steploop import EngineConfig
from steploop.simulation import DEVICES, MODELS, Deployment
from steploop.simulation.planning.breaking import (
    BACKLOG,
    COMPUTE,
    KV_CACHE,
    SLOTS,
    STATIC_BATCH,
    STEP_TIME,
    TOKEN_BUDGET,
    Breaking,
    explain,
)
from steploop.simulation.planning.limits import largest_rate
from steploop.simulation.planning.trials import Layout, Limits, Objective, Trials
from steploop.simulation.settings import Settings
from steploop.workload import WorkloadSource, parse_arrivals, parse_lengths


def breaking(
    slo: dict[str, float],
    *,
    prompts: int = 200,
    outputs: str = "uniform:50:150",
    seqs: int = 256,
    tokens: int = 2048,
    **engine: Any,
) -> Breaking:
    settings = Settings(
        deployment=Deployment(model=MODELS["llama-3-8b"], device=DEVICES["H100"]),
        engine=EngineConfig(model="llama-3-8b", max_model_len=4096, enable_prefix_caching=False, **engine),
        source=WorkloadSource(
            lengths=(parse_lengths(f"fixed:{prompts}"), parse_lengths(outputs)), arrivals=parse_arrivals("poisson:1")
        ),
    )
    trials = Trials(settings, Objective(slo=slo), num_requests=2000)
    limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    good = trials.run(Layout(tensor_parallel_size=1, num_replicas=1), limits, 0.1)
    assert good.good
    failing_rate = largest_rate(trials, good, good.rate, 1e4).failing_rate
    assert failing_rate is not None
    return explain(trials, trials.run(good.layout, limits, failing_rate))


def test_kv_cache() -> None:
    found = breaking({"ttft": 1}, num_kv_blocks=256)
    assert (found.first, found.cause) == ("ttft", KV_CACHE)
    assert found.figures["kv_use"] > 0.8
    assert found.figures["share_of_slots"] < 0.2


def test_kv_cache_that_a_policy_keeps_for_later() -> None:
    found = breaking({"ttft": 1}, num_kv_blocks=256, scheduling_policy="reserve")
    assert found.cause == KV_CACHE
    assert found.figures["share_preempted"] == 0


def test_slots() -> None:
    found = breaking({"ttft": 1}, seqs=8)
    assert (found.first, found.cause) == ("ttft", SLOTS)
    assert found.figures["share_of_slots"] > 0.95
    assert found.figures["kv_use"] < 0.2
    assert found.figures["queue_time"] > 0.5


def test_token_budget() -> None:
    found = breaking({"ttft": 0.5}, prompts=1000, outputs="uniform:2:10", tokens=64, seqs=64)
    assert (found.first, found.cause) == ("ttft", TOKEN_BUDGET)
    assert found.figures["share_of_tokens"] > 0.95


def test_compute() -> None:
    found = breaking({"ttft": 1}, prompts=3000, outputs="uniform:2:10")
    assert (found.first, found.cause) == ("ttft", COMPUTE)
    assert found.figures["share_of_time_busy"] > 0.8
    assert found.figures["share_of_slots"] < 0.5
    assert found.figures["kv_use"] < 0.5


def test_slots_that_are_taken_because_steps_are_slow() -> None:
    """Twice as many slots are filled as well, and bring nothing."""
    found = breaking({"ttft": 1}, prompts=144, outputs="uniform:30:90", tokens=1024)
    assert found.figures["share_of_slots"] > 0.8
    assert found.cause == COMPUTE


@pytest.mark.parametrize("slo", [{"itl": 0.02}, {"tpot": 0.012}])
def test_step_time(slo: dict[str, float]) -> None:
    found = breaking(slo, seqs=1024)
    assert (found.first, found.cause) == (next(iter(slo)), STEP_TIME)
    assert found.figures["longest_step"] > 0.012
    assert found.figures["share_preempted"] == 0


def test_static_batches() -> None:
    found = breaking({"ttft": 2}, outputs="exponential:100:1000:clip", scheduling_policy="static", seqs=1024)
    assert found.cause == STATIC_BATCH


def test_backlog() -> None:
    """All limits are met for as long as the workload lasts."""
    found = breaking({"e2e": 1e4})
    assert found.first == BACKLOG
    assert found.trial.share_within == {"e2e": 1.0}
    assert found.trial.backlog_growth > 0.02


def test_of_two_limits_that_which_fails() -> None:
    assert breaking({"ttft": 5, "itl": 0.02}, seqs=1024).first == "itl"
    assert breaking({"ttft": 0.05, "itl": 5}).first == "ttft"
