"""Simulation: the engine's own scheduler and block manager on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steploop import _C
from steploop.checks import checked_int
from steploop.config import EngineConfig
from steploop.errors import InvalidArgumentError
from steploop.scheduling import check_token_budget, check_watermark, native_settings
from steploop.simulation.costs import Deployment
from steploop.workload import Workload

ROUTINGS = ("round_robin", "least_outstanding", "prefix_affine")
QUANTILES = (0.5, 0.9, 0.99)
_US = 1e6


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What happened. Times are microseconds from the first arrival; arrays have one value a request."""

    workload: Workload
    arrival_us: npt.NDArray[np.int64]
    raw: dict[str, Any]
    """What `_C.simulate` returned."""
    max_num_seqs: int
    num_kv_blocks: int
    """Of each replica, both."""

    @property
    def requests(self) -> dict[str, npt.NDArray[Any]]:
        """Columns by request."""
        columns: dict[str, npt.NDArray[Any]] = self.raw["requests"]
        return columns

    @property
    def num_replicas(self) -> int:
        """How many there were."""
        return len(self.raw["replicas"])

    @property
    def duration(self) -> float:
        """Seconds until the last step ended; > 0."""
        return max(float(self.raw["ended_us"]) / _US, 1e-9)

    def total(self, name: str) -> int:
        """A count of the schedulers' (see `LLMEngine.stats`), over all replicas."""
        return int(sum(replica[name] for replica in self.raw["replicas"]))


def simulate(
    workload: Workload,
    deployment: Deployment,
    engine: EngineConfig,
    *,
    max_tokens: int | npt.NDArray[np.int32] | None = None,
    num_replicas: int = 1,
    routing: str = "least_outstanding",
    record_spans: bool = False,
    record_schedule: bool = False,
    step_durations_us: npt.NDArray[np.int64] | None = None,
    report: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Serves a workload to its end, as `LLMEngine` would that is stepped without a pause.

    Args:
        engine: What the scheduler is told; its `model`, types and device are not looked at. `max_model_len` defaults to
            the model's, the KV cache to what the device has left (`kv_cache_memory_bytes` and `num_kv_blocks` are of
            each device).
        max_tokens: What each request asks for, though it ends where it was drawn: one number, or one for each.
            Default: the longest that was drawn.
        routing: Which replica gets a request as it arrives: "round_robin"; "least_outstanding": the one whose
            unfinished requests have the fewest tokens, prompt and max_tokens; "prefix_affine": the same, less what its
            prefix cache holds of the new prompt.
        record_spans: Also `raw["spans"]`: from when to when each request had a place in the batch.
        record_schedule: Also `raw["schedule"]`: every step, and every sequence in it.
        step_durations_us: How long each step takes, instead of what the cost model says; one replica.
        report: Told now and then how many requests have ended.

    Raises:
        InvalidArgumentError: a setting that cannot be, or a model that does not fit the device.
        RequestTooLongError: a request that could never be served.
    """
    if routing not in ROUTINGS:
        raise InvalidArgumentError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    settings = scheduler_settings(deployment, engine)
    if not workload.arrival_times[-1] * _US < 2**59:
        raise InvalidArgumentError(f"arrivals must be within 18,000 years, got {workload.arrival_times[-1]:g} s")
    arrival_us = np.rint(workload.arrival_times * _US).astype(np.int64)
    segments = workload.segments
    raw = _C.simulate(
        _C.SchedulerConfig(**settings),
        _C.CostModel(deployment.cost_fields(engine.block_size)),
        arrival_us=arrival_us,
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        max_tokens=_asked(workload, max_tokens),
        priorities=workload.priorities,
        tenants=workload.tenants,
        segment_offsets=None if segments is None else segments.offsets,
        segment_contents=None if segments is None else segments.contents,
        segment_lengths=None if segments is None else segments.lengths,
        num_replicas=checked_int("num_replicas", num_replicas, low=1),
        routing=routing,
        step_durations_us=step_durations_us,
        record_spans=record_spans,
        record_schedule=record_schedule,
        quantiles=list(QUANTILES),
        report=report,
    )
    return SimulationResult(
        workload=workload,
        arrival_us=arrival_us,
        raw=raw,
        max_num_seqs=settings["max_num_seqs"],
        num_kv_blocks=settings["num_kv_blocks"],
    )


def _asked(workload: Workload, max_tokens: int | npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
    """[num_requests] Their max_tokens."""
    if isinstance(max_tokens, np.ndarray):
        return max_tokens.astype(np.int32)
    longest = int(workload.num_output_tokens.max())
    asked = longest if max_tokens is None else checked_int("max_tokens", max_tokens, low=1)
    if asked < longest:
        raise InvalidArgumentError(f"max_tokens must be at least the longest output drawn, {longest}, got {max_tokens}")
    return np.full(len(workload), asked, np.int32)


def scheduler_settings(deployment: Deployment, engine: EngineConfig) -> dict[str, Any]:
    """The arguments of `_C.SchedulerConfig`.

    Raises:
        InvalidArgumentError: as `simulate`.
    """
    max_model_len = longest_sequence(deployment, engine)
    check_token_budget(engine, max_model_len)
    num_kv_blocks = engine.num_kv_blocks
    if num_kv_blocks is None:
        num_kv_blocks = deployment.num_kv_blocks(engine.block_size, max_model_len, engine.kv_cache_memory_bytes)
    check_watermark(engine, num_kv_blocks)
    block_bytes = engine.block_size * deployment.kv_bytes_per_token
    settings = native_settings(engine)
    for name in ("iteration_stats_capacity", "max_num_queued_requests", "max_num_queued_tokens"):
        del settings[name]
    num_host_blocks = 0
    if engine.preemption_mode != "recompute":
        num_host_blocks = num_kv_blocks
        if engine.swap_space_bytes is not None:
            num_host_blocks = min(engine.swap_space_bytes // block_bytes, 2**31 - 1)
    return settings | {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "num_kv_blocks": num_kv_blocks,
        "block_size": engine.block_size,
        "num_host_blocks": num_host_blocks,
        "swap_block_us": block_bytes / deployment.device.host_bytes_per_second * _US,
    }


def longest_sequence(deployment: Deployment, engine: EngineConfig) -> int:
    """The max_model_len that was asked for, or the model's.

    Raises:
        InvalidArgumentError: the model has no such length.
    """
    limit = deployment.model.max_model_len
    if engine.max_model_len is not None and engine.max_model_len > limit:
        raise InvalidArgumentError(
            f"max_model_len must be <= {limit}, the limit of {deployment.model.name}, got {engine.max_model_len}"
        )
    return engine.max_model_len or limit
