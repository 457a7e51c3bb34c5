"""plan: the smallest layout, limits and KV cache, each held to its neighbours; and what it says where there is none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from steploop import EngineConfig
from steploop.errors import InvalidArgumentError, RequestTooLongError
from steploop.simulation import DEVICES, MODELS, Deployment
from steploop.simulation.planning import Layout, Limits, Objective, Plan, plan
from steploop.simulation.planning.limits import PRECISION
from steploop.simulation.planning.trials import Trials, backlog_growth
from steploop.simulation.settings import Settings
from steploop.workload import WorkloadSource, parse_arrivals, parse_lengths

SLO = {"ttft": 0.5, "itl": 0.05}


def source(prompts: str = "uniform:32:256", outputs: str = "exponential:64:256:clip", **options: Any) -> WorkloadSource:
    return WorkloadSource(
        lengths=(parse_lengths(prompts), parse_lengths(outputs)),
        **{"arrivals": parse_arrivals("poisson:1"), **options},
    )


def settings(
    *, model: str = "llama-3-8b", device: str = "L4", workload: WorkloadSource | None = None, **engine: Any
) -> Settings:
    engine = {"max_model_len": 1024, **engine}
    return Settings(
        deployment=Deployment(model=MODELS[model], device=DEVICES[device]),
        engine=EngineConfig(model=model, **engine),
        source=workload or source(),
    )


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(settings(), rate=60, slo={"ttft": 2, "itl": 0.4}, num_requests=2000)


def test_the_fewest_devices(found: Plan) -> None:
    chosen = found.chosen
    assert chosen is not None
    assert chosen.good
    assert chosen.layout.num_devices > 1
    # Every layout of fewer devices that was tried is bad with every limits, and the next smaller one was tried.
    fewer = [
        trial
        for trial in found.trials
        if trial.layout.num_devices < chosen.layout.num_devices and trial.rate == found.rate
    ]
    assert fewer
    assert not any(trial.good for trial in fewer)
    layout = chosen.layout
    if layout.num_replicas > 1:
        smaller = Layout(tensor_parallel_size=layout.tensor_parallel_size, num_replicas=layout.num_replicas - 1)
        assert smaller in {trial.layout for trial in fewer}


def test_the_limits_bear_most(found: Plan) -> None:
    assert found.chosen is not None
    best = found.limits[-1]
    assert best.limits == found.chosen.limits
    assert best.rate >= found.rate
    assert best.failing_rate is not None
    assert best.rate < best.failing_rate <= best.rate * (1 + PRECISION)
    assert found.headroom == pytest.approx(best.rate / found.rate - 1)
    assert [step.rate for step in found.limits] == sorted(step.rate for step in found.limits)
    # Half and double of each were no better.
    around = {
        (trial.limits.max_num_seqs, trial.limits.max_num_batched_tokens)
        for trial in found.trials
        if trial.layout == found.chosen.layout
    }
    seqs, tokens = best.limits.max_num_seqs, best.limits.max_num_batched_tokens
    assert {(seqs, 2 * tokens), (2 * seqs, tokens)} <= around
    better = [
        trial
        for trial in found.trials
        if trial.layout == found.chosen.layout and trial.rate > best.failing_rate * (1 + PRECISION) and trial.good
    ]
    assert not better


def test_the_smallest_kv_cache(found: Plan) -> None:
    budget, chosen = found.kv_budget, found.chosen
    assert budget is not None
    assert chosen is not None
    assert found.settings is not None
    assert budget.trial.good
    assert budget.num_kv_blocks < chosen.num_kv_blocks
    block_bytes = 16 * found.settings.deployment.kv_bytes_per_token
    assert budget.memory_bytes == budget.num_kv_blocks * block_bytes
    assert budget.available_bytes == chosen.num_kv_blocks * block_bytes
    smaller = [
        trial.num_kv_blocks
        for trial in found.trials
        if trial.layout == chosen.layout
        and trial.limits == chosen.limits
        and trial.rate == found.rate
        and trial.num_kv_blocks < budget.num_kv_blocks
        and not trial.good
    ]
    assert max(smaller) >= budget.num_kv_blocks / (1 + 2 * PRECISION) - 1


def test_what_breaks(found: Plan) -> None:
    assert found.breaking is not None
    trial = found.breaking.trial
    assert not trial.good
    assert trial.rate == found.limits[-1].failing_rate
    assert found.breaking.first in (*SLO, "backlog")


def test_the_same_for_the_same_seed() -> None:
    arguments: dict[str, Any] = {"rate": 2, "slo": {"ttft": 5}, "num_requests": 300, "max_devices": 2}
    assert plan(settings(), **arguments).as_dict() == plan(settings(), **arguments).as_dict()
    other = plan(settings(workload=source(seed=1)), **arguments)
    assert other.workload["fingerprint"] != plan(settings(), **arguments).workload["fingerprint"]


def test_what_is_kept() -> None:
    asked = settings(device="H100", max_num_seqs=48, max_num_batched_tokens=300, kv_cache_memory_bytes=2**30)
    found = plan(asked, rate=5, slo=SLO, num_requests=300, keep=["max_num_seqs", "max_num_batched_tokens"])
    assert {trial.limits for trial in found.trials if trial.rate == 5} == {
        Limits(max_num_seqs=48, max_num_batched_tokens=300)
    }
    assert found.kv_budget is None
    assert found.chosen is not None
    assert found.chosen.num_kv_blocks == 2**30 // (16 * 131_072)
    one = plan(asked, rate=5, slo=SLO, num_requests=300, keep=["max_num_seqs"])
    assert {trial.limits.max_num_seqs for trial in one.trials if trial.rate == 5} == {48}
    assert len({trial.limits.max_num_batched_tokens for trial in one.trials}) > 1


def test_degrees() -> None:
    found = plan(settings(device="H100"), rate=5, slo=SLO, num_requests=300, degrees=[4, 2], max_devices=9)
    assert [degree.tensor_parallel_size for degree in found.degrees] == [2, 4]
    assert found.chosen is not None
    assert found.chosen.layout == Layout(tensor_parallel_size=2, num_replicas=1)
    every = plan(settings(device="H100"), rate=5, slo=SLO, num_requests=300, max_devices=9)
    assert [degree.tensor_parallel_size for degree in every.degrees] == [1, 2, 4, 8]


def test_whole_prompts() -> None:
    found = plan(
        settings(device="H100", enable_chunked_prefill=False, max_num_batched_tokens=1024),
        rate=5,
        slo={"ttft": 1},
        num_requests=300,
    )
    assert found.chosen is not None
    assert min(trial.limits.max_num_batched_tokens for trial in found.trials) >= 1024


def test_a_model_that_does_not_fit() -> None:
    found = plan(settings(model="llama-3-70b"), rate=1, slo=SLO, num_requests=300, max_devices=2)
    assert found.chosen is None
    assert found.trials == []
    assert found.headroom is None
    assert found.reason == found.degrees[-1].problem
    assert "do not fit L4 at tensor_parallel_size=2" in str(found.reason)


def test_steps_that_are_too_slow_alone() -> None:
    found = plan(settings(), rate=1, slo={"itl": 1e-4}, num_requests=300, max_devices=8)
    assert found.chosen is None
    assert found.trials == []
    assert not any(degree.possible for degree in found.degrees)
    assert "no number of replicas helps" in str(found.reason)
    assert "within itl 0.0001 s" in str(found.reason)


def test_too_few_devices() -> None:
    found = plan(settings(), rate=100, slo={"ttft": 2, "itl": 0.4}, num_requests=1000, max_devices=2)
    assert found.chosen is None
    assert found.breaking is not None
    assert "no layout of at most 2 devices meets it" in str(found.reason)
    assert found.breaking.trial.attainment < 0.99 or found.breaking.trial.backlog_growth > 0.02


def test_limits_that_are_kept_are_all_that_is_tried() -> None:
    """Though what breaks is found out with others."""
    one = settings(device="H100", max_num_seqs=8)
    found = plan(one, rate=20, slo={"ttft": 0.5}, max_devices=1, keep=["max_num_seqs"], num_requests=1000)
    assert found.chosen is None
    assert found.breaking is not None
    assert found.breaking.cause == "slots"
    assert {trial.limits.max_num_seqs for trial in found.trials} == {8}
    assert not any(trial.good for trial in found.trials)


def test_an_unstable_system_is_not_good_however_long_the_limits() -> None:
    """More than one device bears, and limits longer than all of the workload takes."""
    trials = Trials(settings(), Objective(slo={"e2e": 1e4}), num_requests=2000)
    layout, limits = Layout(tensor_parallel_size=1, num_replicas=1), Limits(max_num_seqs=64, max_num_batched_tokens=512)
    result = trials.simulate(layout, limits, 1e6)
    capacity = 2000 / result.duration
    for share, good in ((1.25, False), (0.8, True)):
        trial = trials.run(layout, limits, share * capacity)
        assert trial.attainment == 1
        assert trial.good is good
    assert trials.run(layout, limits, 1.25 * capacity).backlog_growth > 0.08


def test_a_system_that_still_fills_up_is_no_backlog() -> None:
    """All are begun at once, and take longer than all of them take to come."""
    lengths = (parse_lengths("fixed:50"), parse_lengths("fixed:1000"))
    one = settings(device="H100", max_model_len=2048, workload=dataclasses.replace(source(), lengths=lengths))
    trials = Trials(one, Objective(slo={"ttft": 1.0}), num_requests=1000)
    layout, limits = (
        Layout(tensor_parallel_size=1, num_replicas=16),
        Limits(max_num_seqs=512, max_num_batched_tokens=2048),
    )
    trial = trials.run(layout, limits, 100.0)
    assert trial.attainment == 1
    assert trial.good


@pytest.mark.parametrize(("kept", "growth"), [(1.0, 0.0), (0.5, 0.5), (0.9, 0.1)])
def test_backlog_growth(kept: float, growth: float) -> None:
    """One at a time is served, at `kept` of the rate at which they come."""
    arrived = np.arange(1000) / 10
    ended = np.arange(1, 1001) / 10 / kept
    grown, most = backlog_growth(ended - arrived, arrived)
    assert grown == pytest.approx(growth, abs=0.01)
    assert (grown > most) is (growth > 0)


def test_many_in_flight_are_no_backlog() -> None:
    """Each takes 30 s, however many there are."""
    for seed in range(20):
        arrived = np.cumsum(np.random.default_rng(seed).standard_exponential(2000)) / 10
        grown, most = backlog_growth(np.full(2000, 30.0), arrived)
        assert grown <= most


def test_how_many_are_drawn() -> None:
    trials = Trials(settings(), Objective(slo=SLO))
    assert [trials.num_requests(rate) for rate in (0.1, 10, 1000)] == [2000, 3000, 20_000]
    assert Trials(settings(workload=source(num_recorded=700)), Objective(slo=SLO)).num_requests(10) == 700


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rate": -1}, "rate must be a finite number > 0, got -1"),
        ({"rate": float("nan")}, "rate must be a finite number > 0, got nan"),
        ({"attainment": 0}, r"attainment must be in (0, 1], got 0"),
        ({"attainment": 1.01}, r"attainment must be in (0, 1], got 1.01"),
        ({"attainment": float("nan")}, r"attainment must be in (0, 1], got nan"),
        ({"slo": {}}, "an SLO must have at least one limit, got none"),
        ({"slo": {"itll": 1}}, "did you mean itl=SECONDS?"),
        ({"slo": {"itl": 0}}, "the SLO of itl must be a finite number > 0, got 0"),
        ({"max_devices": 0}, "max_devices must be >= 1, got 0"),
        ({"degrees": [3]}, "tensor_parallel_size must divide the 32 heads of llama-3-8b, got 3"),
        ({"degrees": [128]}, "tensor_parallel_size must be at most max_devices, 64, got 128"),
        ({"keep": ["max_num_seq"]}, "did you mean max_num_seqs?"),
        ({"num_requests": 10}, "a plan needs at least 100 requests, got 10"),
    ],
)
def test_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(settings(), **{"rate": 1, "slo": SLO, **arguments})
    assert words in str(caught.value)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len must be <= 8192"):
        plan(settings(max_model_len=10_000), rate=1, slo=SLO)
    with pytest.raises(InvalidArgumentError, match="burst has no rate"):
        plan(settings(workload=source(arrivals=parse_arrivals("burst"))), rate=1, slo=SLO)
    with pytest.raises(RequestTooLongError, match="request 0"):
        plan(settings(device="H100", workload=source(prompts="fixed:2000")), rate=1, slo=SLO)


def test_prompts_in_small_chunks() -> None:
    """Two devices are fast enough between tokens only if prompts take little of each step."""
    workload = source("lognormal:600:0.8:4000:redraw")
    found = plan(
        settings(model="llama-3-70b", device="H100", workload=workload, max_model_len=8192),
        rate=4,
        slo={"ttft": 0.6, "itl": 0.05},
        num_requests=1000,
        degrees=[2],
    )
    assert found.chosen is not None
    assert found.chosen.limits.max_num_batched_tokens <= 256
