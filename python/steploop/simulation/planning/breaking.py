"""What breaks first: which limit fails as the load grows, and which of the engine's means runs out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steploop.simulation.figures import FloatArray, request_latencies, share_of_time_busy, within
from steploop.simulation.planning.trials import Trial, Trials
from steploop.simulation.simulation import SimulationResult

BACKLOG = "backlog"
"""In place of a limit: all are met, but what comes is not served."""

KV_CACHE, SLOTS, TOKEN_BUDGET = "kv_cache", "slots", "token_budget"
COMPUTE, STEP_TIME, STATIC_BATCH = "compute", "step_time", "static_batch"

_PARTS = {
    "ttft": ("queue_time", "prompt_time"),
    "itl": ("decode_time",),
    "tpot": ("decode_time",),
    "e2e": ("queue_time", "prompt_time", "decode_time"),
    BACKLOG: ("queue_time", "prompt_time"),
}
"""What the time that each limit is for consists of."""


@dataclass(frozen=True, kw_only=True)
class Breaking:
    """How a trial fails its objective."""

    trial: Trial
    first: str
    """The limit that the fewest requests are within; BACKLOG: enough are within all."""
    cause: str
    """See `explain`."""
    figures: dict[str, float]
    """Seconds are medians of the requests that fail; shares of slots, tokens and KV blocks are those taken while
    requests waited."""


def explain(trials: Trials, trial: Trial) -> Breaking:
    """What a trial that is not good lacks: what would at least halve the failures if there were twice as much of it, of
    several that which leaves the fewest.

    KV_CACHE: KV blocks; SLOTS: max_num_seqs; TOKEN_BUDGET: max_num_batched_tokens. Where none of these would, it is the
    steps, by where requests that fail spend most of their time: STEP_TIME between tokens, since steps with that many
    sequences, or with prompts beside them, take too long; COMPUTE before the first one, since prompts come faster than
    steps take them. Under the policy static the latter is STATIC_BATCH: nobody starts before a batch has ended.
    """
    attained = trial.attainment >= trials.objective.attainment
    first = BACKLOG if attained else min(trial.share_within, key=lambda name: trial.share_within[name])
    settings = trials.settings_of(trial.layout, trial.limits)
    result = trials.simulate(trial.layout, trial.limits, trial.rate, trial.num_kv_blocks)
    latencies = request_latencies(result)
    if first == BACKLOG:
        failing = np.arange(len(result.workload)) >= len(result.workload) * 3 // 4
    else:
        failing = ~within(latencies, {first: trials.objective.slo[first]})
    figures = _figures(result, settings.engine.max_num_batched_tokens, latencies, failing)
    cause = _lacking(trials, trial)
    if cause is None:
        longest = max(_PARTS[first], key=lambda name: figures[name])
        before = STATIC_BATCH if settings.engine.scheduling_policy == "static" else COMPUTE
        cause = STEP_TIME if longest == "decode_time" else before
    return Breaking(trial=trial, first=first, cause=cause, figures=figures)


def _lacking(trials: Trials, trial: Trial) -> str | None:
    limits, blocks = trial.limits, trial.num_kv_blocks
    more_slots = dataclasses.replace(limits, max_num_seqs=min(2 * limits.max_num_seqs, 2**31 - 1))
    more_tokens = dataclasses.replace(limits, max_num_batched_tokens=min(2 * limits.max_num_batched_tokens, 2**31 - 1))
    relaxed = {
        KV_CACHE: trials.run_aside(trial.layout, limits, trial.rate, min(2 * blocks, 2**31 - 1)),
        SLOTS: trials.run_aside(trial.layout, more_slots, trial.rate, blocks),
        TOKEN_BUDGET: trials.run_aside(trial.layout, more_tokens, trial.rate, blocks),
    }
    left = {name: _failures(trials, other) for name, other in relaxed.items()}
    best = min(left, key=lambda name: left[name])
    return best if left[best] <= _failures(trials, trial) / 2 else None


def _failures(trials: Trials, trial: Trial) -> float:
    """By how much it is not good; 0: it is."""
    if trial.good:
        return 0.0
    missing = max(trials.objective.attainment - trial.attainment, 0.0)
    return missing + max(trial.backlog_growth - trial.most_backlog_growth, 0.0)


def _figures(
    result: SimulationResult,
    max_num_batched_tokens: int,
    latencies: dict[str, FloatArray],
    failing: npt.NDArray[np.bool_],
) -> dict[str, float]:
    """See Breaking."""
    queue = latencies["queue_time"]
    timeline = result.raw["timeline"]
    chosen = _waiting(timeline)
    busy, steps = timeline["busy_us"][chosen].sum(), timeline["num_steps"][chosen]
    tokens = (timeline["num_prompt_tokens"] + timeline["num_decode_tokens"])[chosen] / steps
    return {
        "queue_time": float(np.median(queue[failing])),
        "prompt_time": float(np.median((latencies["ttft"] - queue)[failing])),
        "decode_time": float(np.median((latencies["e2e"] - latencies["ttft"])[failing])),
        "step_duration": float(busy / steps.sum()) / 1e6,
        "longest_step": float(timeline["longest_step_us"].max()) / 1e6,
        "sequences_in_step": float(timeline["sequences_us"][chosen].sum() / busy),
        "share_of_time_busy": share_of_time_busy(result),
        "share_of_slots": float(timeline["sequences_us"][chosen].sum() / busy) / result.max_num_seqs,
        "kv_use": float(timeline["used_blocks_us"][chosen].sum() / busy) / result.num_kv_blocks,
        "share_of_tokens": float((tokens * timeline["busy_us"][chosen]).sum() / busy) / max_num_batched_tokens,
        "share_preempted": float((result.requests["num_preemptions"] > 0).mean()),
    }


def _waiting(timeline: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Stretches of time in which requests wait, one at least on average in each replica; all where there is none."""
    waiting = (timeline["unfinished_us"] - timeline["sequences_us"]) / timeline["busy_us"]
    chosen: npt.NDArray[np.bool_] = waiting >= 1
    return chosen if chosen.any() else np.ones_like(chosen)
