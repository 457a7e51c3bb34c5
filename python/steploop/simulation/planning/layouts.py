"""Layouts: the fewest devices that meet an objective, over tensor-parallel degrees and numbers of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steploop.errors import InvalidArgumentError
from steploop.simulation.figures import request_latencies, within
from steploop.simulation.planning.trials import Layout, Limits, Trial, Trials
from steploop.simulation.simulation import scheduler_settings

_FIRST_REPLICAS = 8
"""Tried first, and by so many times more."""

_SPARE_SLOTS = 0.5


@dataclass(frozen=True, kw_only=True)
class Degree:
    """A tensor-parallel degree, and whether any number of replicas could meet the objective with it."""

    tensor_parallel_size: int
    problem: str | None = None
    """Why the model cannot run; None: it fits."""
    alone: dict[str, float] | None = None
    """Share of requests within each limit, and ..."""
    alone_median: dict[str, float | None] | None = None
    """... the median latency in seconds, where each request has all of the devices to itself."""
    possible: bool = False
    """Whether so many are within all limits then as are asked for."""


def check_degrees(trials: Trials, degrees: Sequence[int], limits: Limits, rate: float) -> list[Degree]:
    """Each degree with the model in memory and each request alone.

    Args:
        limits: Those that are best for a request alone.
    """
    return [_check_degree(trials, degree, limits, rate) for degree in degrees]


def smallest_layouts(
    trials: Trials, degrees: Sequence[int], grid: Sequence[Limits], rate: float, max_devices: int
) -> list[Trial]:
    """Those of the fewest devices that meet the objective, the one with the lowest pressure first; empty: there is
    none of at most `max_devices`.

    For each degree by bisection: more replicas are taken to be better, and both the number that is found and the next
    smaller one have been simulated. A layout is good if it is with any limits of the grid.
    """
    found: list[Trial] = []
    most = max_devices
    for degree in sorted(degrees):
        cap = most // degree
        if cap < 1:
            break
        best = _fewest_replicas(lambda replicas: try_layout(trials, degree, replicas, grid, rate), cap)  # noqa: B023
        if best is not None:
            most = best.layout.num_devices
            found.append(best)
    tied = [trial.layout for trial in found if trial.layout.num_devices == most]
    if len(tied) > 1:
        found = [_least_pressure(trials, layout, grid, rate) for layout in tied]
    return sorted((trial for trial in found if trial.layout in tied), key=lambda trial: trial.pressure)


def try_layout(trials: Trials, degree: int, num_replicas: int, grid: Sequence[Limits], rate: float) -> Trial:
    """With the limits of the grid in turn, to the first that are good; else the trial that attains most. More slots are
    not tried where half of them were free."""
    layout = Layout(tensor_parallel_size=degree, num_replicas=num_replicas)
    tried: list[Trial] = []
    for limits in grid:
        if any(_has_spare_slots(trial, limits) for trial in tried):
            continue
        tried.append(trials.run(layout, limits, rate))
        if tried[-1].good:
            return tried[-1]
    return max(tried, key=lambda trial: (trial.attainment, -trial.backlog_growth))


def _has_spare_slots(trial: Trial, limits: Limits) -> bool:
    same_tokens = trial.limits.max_num_batched_tokens == limits.max_num_batched_tokens
    return same_tokens and trial.limits.max_num_seqs < limits.max_num_seqs and trial.share_of_slots < _SPARE_SLOTS


def _least_pressure(trials: Trials, layout: Layout, grid: Sequence[Limits], rate: float) -> Trial:
    tried = [trials.run(layout, limits, rate) for limits in grid]
    return min((trial for trial in tried if trial.good), key=lambda trial: trial.pressure)


def _fewest_replicas(attempt: Callable[[int], Trial], most: int) -> Trial | None:
    too_few, enough = 0, min(most, _FIRST_REPLICAS)
    while not (best := attempt(enough)).good:
        if enough == most:
            return None
        too_few, enough = enough, min(most, _FIRST_REPLICAS * enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        trial = attempt(middle)
        if trial.good:
            enough, best = middle, trial
        else:
            too_few = middle
    return best


def _check_degree(trials: Trials, degree: int, limits: Limits, rate: float) -> Degree:
    layout = Layout(tensor_parallel_size=degree, num_replicas=1)
    try:
        settings = trials.settings_of(layout, limits)
        scheduler_settings(settings.deployment, settings.engine)
    except InvalidArgumentError as error:
        return Degree(tensor_parallel_size=degree, problem=str(error))
    objective = trials.objective
    latencies = request_latencies(trials.run_alone(degree, limits, rate))
    medians = {name: latencies[name][~np.isnan(latencies[name])] for name in objective.slo}
    return Degree(
        tensor_parallel_size=degree,
        alone={name: float(within(latencies, {name: limit}).mean()) for name, limit in objective.slo.items()},
        alone_median={name: float(np.median(values)) if len(values) else None for name, values in medians.items()},
        possible=bool(within(latencies, objective.slo).mean() >= objective.attainment),
    )
