"""The figures of a simulation, named and shaped as those of a load test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steploop.simulation.simulation import QUANTILES, SimulationResult

_US = 1e6
FloatArray = npt.NDArray[np.float64]


def summarize(result: SimulationResult, slo: dict[str, float] | None = None) -> dict[str, Any]:
    """All figures. Times are seconds; latencies are counted from a request's arrival.

    Args:
        slo: Limits in seconds (`steploop.loadtest.slo.parse_slo`).
    """
    requests = result.requests
    duration = result.duration
    num_input = int(result.workload.num_prompt_tokens.sum())
    num_output = int(requests["num_output_tokens"].sum())
    latencies = request_latencies(result)
    count = len(result.workload)
    return {
        "duration": duration,
        "requests": {
            "asked": count,
            "completed": count,
            "num_truncated": int((requests["num_output_tokens"] < result.workload.num_output_tokens).sum()),
        },
        "throughput": {
            "requests_per_second": count / duration,
            "input_tokens_per_second": num_input / duration,
            "output_tokens_per_second": num_output / duration,
            "total_tokens_per_second": (num_input + num_output) / duration,
        },
        "goodput": None if slo is None else _goodput(latencies, slo, duration),
        "latencies": {
            "ttft": describe(latencies["ttft"]),
            "tpot": describe(latencies["tpot"]),
            "itl": _inter_token(result.raw["inter_token"]),
            "e2e": describe(latencies["e2e"]),
        },
        "queue_time": describe(latencies["queue_time"]),
        "occupancy": _occupancy(result),
        "kv_cache": _kv_cache(result),
        "preemption": {
            "num_preemptions": result.total("num_preemptions"),
            "num_recomputed_tokens": result.total("num_recomputed_tokens"),
            "num_swapped_out_tokens": result.total("num_swapped_out_tokens"),
            "num_swapped_in_tokens": result.total("num_swapped_in_tokens"),
        },
        "steps": _steps(result),
    }


def request_latencies(result: SimulationResult) -> dict[str, FloatArray]:
    """Seconds by request: "ttft", "tpot", "itl" (its longest wait between two tokens), "e2e" and "queue_time". NaN: it
    has one token and so none of these."""
    requests = result.requests
    arrived = result.arrival_us
    num_later = requests["num_output_tokens"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        decoding = (requests["last_token_us"] - requests["first_token_us"]) / _US
        tpot = np.where(num_later > 0, decoding / num_later, np.nan)
    longest = requests["longest_gap_us"]
    return {
        "ttft": (requests["first_token_us"] - arrived) / _US,
        "tpot": tpot,
        "itl": np.where(longest >= 0, longest / _US, np.nan),
        "e2e": (requests["last_token_us"] - arrived) / _US,
        "queue_time": (requests["scheduled_us"] - arrived) / _US,
    }


def within(latencies: dict[str, FloatArray], slo: dict[str, float]) -> npt.NDArray[np.bool_]:
    """Which requests meet all limits; what has no figure meets the limit to it."""
    good = np.ones(len(latencies["ttft"]), dtype=np.bool_)
    for name, limit in slo.items():
        good &= ~(latencies[name] > limit)
    return good


def describe(values: FloatArray) -> dict[str, Any]:
    """Mean, quantiles, maximum and count of what is not NaN; None of nothing."""
    values = values[~np.isnan(values)]
    if not len(values):
        return _described(0)
    return _described(len(values), values.mean(), np.quantile(values, QUANTILES).tolist(), values.max())


def share_of_slots(result: SimulationResult) -> float:
    """Places of the batch that were taken, on average over the time that steps took."""
    timeline = result.raw["timeline"]
    return float(timeline["sequences_us"].sum() / timeline["busy_us"].sum()) / result.max_num_seqs


def kv_cache_use(result: SimulationResult) -> float:
    """KV blocks that requests held, on average over the time that steps took."""
    timeline = result.raw["timeline"]
    return float(timeline["used_blocks_us"].sum() / timeline["busy_us"].sum()) / result.num_kv_blocks


def share_of_time_busy(result: SimulationResult) -> float:
    """Time in steps, of that to the end of the last one, on average over the replicas."""
    busy = float(result.raw["timeline"]["busy_us"].sum())
    return busy / max(float(result.raw["ended_us"]) * result.num_replicas, 1.0)


def _inter_token(histogram: dict[str, Any]) -> dict[str, Any]:
    if not histogram["count"]:
        return _described(0)
    quantiles = [value / _US for value in histogram["quantiles_us"]]
    return _described(histogram["count"], histogram["mean_us"] / _US, quantiles, histogram["max_us"] / _US)


def _described(
    count: int, mean: Any = None, quantiles: Sequence[Any] | None = None, most: Any = None
) -> dict[str, Any]:
    """None: there is nothing."""
    names = [f"p{share * 100:g}" for share in QUANTILES]
    return {
        "mean": None if mean is None else float(mean),
        **dict(zip(names, quantiles or [None] * len(names), strict=True)),
        "max": None if most is None else float(most),
        "count": count,
    }


def _goodput(latencies: dict[str, FloatArray], slo: dict[str, float], duration: float) -> dict[str, Any]:
    good = within(latencies, slo)
    num_good = int(good.sum())
    return {
        "slo": slo,
        "num_good": num_good,
        "share_of_asked": num_good / len(good),
        "requests_per_second": num_good / duration,
        "share_within": {name: float((~(latencies[name] > limit)).mean()) for name, limit in slo.items()},
    }


def _occupancy(result: SimulationResult) -> dict[str, float]:
    timeline = result.raw["timeline"]
    busy = float(timeline["busy_us"].sum())
    sequences = float(timeline["sequences_us"].sum())
    return {
        "max_num_seqs": result.max_num_seqs,
        "mean_sequences": sequences / busy,
        "share_of_slots": share_of_slots(result),
        "share_of_time_busy": share_of_time_busy(result),
        "mean_unfinished": float(timeline["unfinished_us"].sum()) / busy,
    }


def _kv_cache(result: SimulationResult) -> dict[str, Any]:
    queried = result.total("num_prefix_queried_tokens")
    hit = result.total("num_prefix_hit_tokens")
    return {
        "num_blocks": result.num_kv_blocks,
        "mean_use": kv_cache_use(result),
        "prefix_hit_rate": hit / queried if queried else None,
        "num_cached_tokens": int(result.requests["num_cached_tokens"].sum()),
    }


def _steps(result: SimulationResult) -> dict[str, Any]:
    timeline = result.raw["timeline"]
    count = int(timeline["num_steps"].sum())
    return {
        "count": count,
        "mean_duration": float(timeline["busy_us"].sum()) / count / _US,
        "max_duration": float(timeline["longest_step_us"].max()) / _US,
    }
