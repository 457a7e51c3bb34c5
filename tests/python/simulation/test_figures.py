"""Figures of simulations, by hand: two requests whose steps take what the test says."""

from __future__ import annotations

import numpy as np
import pytest

from steploop import EngineConfig
from steploop.simulation import DEVICES, MODELS, Deployment, SimulationResult, simulate, summarize
from steploop.simulation.figures import describe, kv_cache_use, request_latencies, share_of_slots, within
from steploop.workload import Workload

MS = 1000


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    """The first has 3 tokens, the second, which comes at 15 ms, one. Steps: prompt (10 ms), decode (20 ms, the second
    one waits), prompt and decode (40 ms)."""
    workload = Workload(
        seed=0,
        arrival_times=np.array([0.0, 0.015]),
        num_prompt_tokens=np.array([16, 32], np.int32),
        num_output_tokens=np.array([3, 1], np.int32),
    )
    deployment = Deployment(model=MODELS["opt-13b"], device=DEVICES["A100-40GB"])
    engine = EngineConfig(model="opt-13b", max_num_seqs=4, num_kv_blocks=128)
    durations = np.array([10 * MS, 20 * MS, 40 * MS], np.int64)
    return simulate(workload, deployment, engine, step_durations_us=durations)


def test_latencies(result: SimulationResult) -> None:
    latencies = request_latencies(result)
    np.testing.assert_allclose(latencies["ttft"], [0.010, 0.055])
    np.testing.assert_allclose(latencies["e2e"], [0.070, 0.055])
    np.testing.assert_allclose(latencies["tpot"], [0.030, np.nan])
    np.testing.assert_allclose(latencies["itl"], [0.040, np.nan])
    np.testing.assert_allclose(latencies["queue_time"], [0.0, 0.015])


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 0.010}, [True, False]),
        ({"ttft": 0.0549}, [True, False]),
        ({"ttft": 0.055}, [True, True]),
        ({"itl": 0.039}, [False, True]),  # the second has no wait between tokens
        ({"ttft": 0.02, "itl": 0.039}, [False, False]),
        ({"e2e": 0.06, "tpot": 0.03}, [False, True]),
    ],
)
def test_within(slo: dict[str, float], good: list[bool], result: SimulationResult) -> None:
    assert within(request_latencies(result), slo).tolist() == good


def test_summary(result: SimulationResult) -> None:
    figures = summarize(result, {"ttft": 0.02, "itl": 0.04})
    assert figures["duration"] == pytest.approx(0.070)
    assert figures["requests"] == {"asked": 2, "completed": 2, "num_truncated": 0}
    assert figures["throughput"] == {
        "requests_per_second": pytest.approx(2 / 0.07),
        "input_tokens_per_second": pytest.approx(48 / 0.07),
        "output_tokens_per_second": pytest.approx(4 / 0.07),
        "total_tokens_per_second": pytest.approx(52 / 0.07),
    }
    goodput = figures["goodput"]
    assert (goodput["num_good"], goodput["share_of_asked"]) == (1, 0.5)
    assert goodput["share_within"] == {"ttft": 0.5, "itl": 1.0}
    assert goodput["requests_per_second"] == pytest.approx(1 / 0.07)
    assert figures["latencies"]["ttft"]["mean"] == pytest.approx(0.0325)
    assert figures["latencies"]["itl"]["count"] == 2  # waits, not requests
    assert figures["latencies"]["itl"]["max"] == pytest.approx(0.040)
    assert figures["queue_time"]["max"] == pytest.approx(0.015)
    assert figures["steps"] == {"count": 3, "mean_duration": pytest.approx(0.07 / 3), "max_duration": 0.040}
    occupancy = figures["occupancy"]
    assert occupancy["share_of_time_busy"] == 1.0
    # One sequence for 30 ms and two for 40.
    assert occupancy["mean_sequences"] == pytest.approx((30 + 2 * 40) / 70)
    assert occupancy["share_of_slots"] == share_of_slots(result) == pytest.approx((30 + 2 * 40) / 70 / 4)
    # Blocks held while each step runs: 1 for 10 ms (16 tokens), 2 for 20, and 4 in the last, which ends both.
    blocks = (1 * 10 + 2 * 20 + 4 * 40) / 70
    assert figures["kv_cache"]["mean_use"] == kv_cache_use(result) == pytest.approx(blocks / 128)
    assert figures["preemption"]["num_preemptions"] == 0


def test_without_an_slo(result: SimulationResult) -> None:
    assert summarize(result)["goodput"] is None


def test_describe() -> None:
    nothing = {"mean": None, "p50": None, "p90": None, "p99": None, "max": None, "count": 0}
    assert describe(np.array([np.nan])) == nothing
    assert describe(np.array([2.0, np.nan, 4.0])) == {
        "mean": 3.0,
        "p50": 3.0,
        "p90": pytest.approx(3.8),
        "p99": pytest.approx(3.98),
        "max": 4.0,
        "count": 2,
    }
