"""plan: the fewest devices and the limits that meet an objective, and what breaks first as the load grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from steploop.checks import check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.simulation.planning.breaking import Breaking, explain
from steploop.simulation.planning.kv_budget import KvBudget, smallest_kv_cache
from steploop.simulation.planning.layouts import Degree, check_degrees, smallest_layouts
from steploop.simulation.planning.limits import SEARCHED, LimitGrid, LoadLimit, best_limits
from steploop.simulation.planning.trials import Objective, Trial, Trials
from steploop.simulation.settings import Settings
from steploop.workload.specs import unknown_name

MOST_DEVICES = 4096
FEWEST_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found. Where nothing meets the objective, `chosen` is None and `reason` says why."""

    objective: Objective
    rate: float
    max_devices: int
    workload: dict[str, Any]
    """What was drawn at that rate (`Workload.summary`)."""
    degrees: list[Degree]
    """All that divide the model's heads, up to max_devices."""
    trials: list[Trial]
    """All simulations, in their order."""
    chosen: Trial | None = None
    """At the rate of the plan, with the layout and limits that it found and all of the memory for the KV cache."""
    settings: Settings | None = None
    """Of `chosen`."""
    limits: list[LoadLimit] = dataclasses.field(default_factory=list)
    """How the limits became better; the last are those chosen, with the largest rate that they bear."""
    kv_budget: KvBudget | None = None
    """None: a size of the KV cache was given, or nothing was found."""
    breaking: Breaking | None = None
    """Just above the largest rate; without `chosen`: of the trial that came nearest. None: nothing breaks up to
    `limits.MOST_TIMES` the rate, or no layout was tried."""
    reason: str | None = None

    @property
    def headroom(self) -> float | None:
        """By how much the load may grow, as a share of the rate: 0.25: to 1.25 times. None: nothing was found."""
        return self.limits[-1].rate / self.rate - 1 if self.limits else None

    def as_dict(self) -> dict[str, Any]:
        """For a report in JSON."""
        report = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "settings"
        }
        return {**report, "settings": self.settings and self.settings.describe(), "headroom": self.headroom}


def plan(
    settings: Settings,
    *,
    rate: float,
    slo: dict[str, float],
    attainment: float = 0.99,
    max_devices: int = 64,
    degrees: Sequence[int] | None = None,
    keep: Collection[str] = (),
    num_requests: int | None = None,
    report: Callable[[], None] = lambda: None,
) -> Plan:
    """Searches, with a simulation for each thing that is tried; the same arguments give the same plan.

    First the layout: the fewest devices in all, over tensor-parallel degrees that divide the heads and numbers of
    replicas, each with a few pairs of limits; among equals the one whose latencies leave most room. Then its
    `max_num_seqs` and `max_num_batched_tokens`, by halves and doubles, so that the rate can grow most; then the
    smallest KV cache at the rate that was asked for; and last what fails just above the largest rate, with all of the
    memory for the KV cache. `Trial` says when a simulation is good, `explain` what is said to fail.

    Args:
        settings: Model, device, engine and workload; its degree, num_replicas and, unless kept, limits do not count.
        rate: Of arrivals: requests a second, or conversations where the workload has some. It replaces that of the
            workload's arrivals.
        slo: Limits in seconds by name.
        attainment: Share of the requests that must be within all of them.
        degrees: Tensor-parallel degrees to try. Default: all.
        keep: "max_num_seqs" and "max_num_batched_tokens" stay as the settings have them where they are named here.
        num_requests: To draw. Default: see `Trials.num_requests`.
        report: Called after each simulation.

    Raises:
        InvalidArgumentError: a setting that cannot be, alone or with another.
        RequestTooLongError: a request that could never be served.
    """
    check_positive("rate", rate)
    objective = Objective(slo=slo, attainment=attainment)
    checked_int("max_devices", max_devices, low=1, high=MOST_DEVICES)
    for name in keep:
        if name not in SEARCHED:
            raise unknown_name("keep", name, SEARCHED)
    trials = Trials(settings, objective, num_requests=num_requests, report=report)
    if trials.num_requests(rate) < FEWEST_REQUESTS:
        raise InvalidArgumentError(f"a plan needs at least {FEWEST_REQUESTS} requests, got {trials.num_requests(rate)}")
    grid = LimitGrid(trials, frozenset(keep))
    checked = check_degrees(trials, _degrees(settings, degrees, max_devices), grid.widest(), rate)
    found = Plan(
        objective=objective,
        rate=rate,
        max_devices=max_devices,
        workload=trials.workload(rate).summary(),
        degrees=checked,
        trials=[],
    )
    possible = [degree.tensor_parallel_size for degree in checked if degree.possible]
    layouts = smallest_layouts(trials, possible, grid.first(), rate, max_devices)
    changes = _improve(trials, layouts[0], grid) if layouts else _explain_failure(trials, found)
    return dataclasses.replace(found, trials=trials.all, **changes)


def _improve(trials: Trials, good: Trial, grid: LimitGrid) -> dict[str, Any]:
    """Limits, KV budget, and what breaks first."""
    limits = best_limits(trials, good, grid)
    best = limits[-1]
    chosen = trials.run(good.layout, best.limits, good.rate)
    if not chosen.good:  # though good at a larger rate: the edge of what can be told apart
        limits, best, chosen = limits[:1], limits[0], good
    settings = trials.settings_of(chosen.layout, chosen.limits)
    is_given = settings.engine.kv_cache_memory_bytes is not None or settings.engine.num_kv_blocks is not None
    return {
        "chosen": chosen,
        "settings": settings,
        "limits": limits,
        "kv_budget": None if is_given else smallest_kv_cache(trials, chosen),
        "breaking": None
        if best.failing_rate is None
        else explain(trials, trials.run(chosen.layout, best.limits, best.failing_rate)),
    }


def _explain_failure(trials: Trials, found: Plan) -> dict[str, Any]:
    """Why there is no layout."""
    fitting = [degree for degree in found.degrees if degree.problem is None]
    if not fitting:
        return {"reason": found.degrees[-1].problem}
    if not any(degree.possible for degree in fitting):
        return {"reason": _impossible_alone(fitting, found.objective)}
    nearest = max(trials.all, key=lambda trial: (trial.attainment, -trial.backlog_growth))
    return {
        "breaking": explain(trials, nearest),
        "reason": f"no layout of at most {found.max_devices} devices meets it; {nearest.layout.num_devices} come "
        f"nearest, with {nearest.attainment:.1%} of the requests",
    }


def _impossible_alone(fitting: Sequence[Degree], objective: Objective) -> str:
    """No replicas help where a request that has all of the devices to itself is too slow."""

    def worst(degree: Degree) -> tuple[float, str]:
        return min((share, name) for name, share in (degree.alone or {}).items())

    def goodness(degree: Degree) -> tuple[float, float]:
        share, name = worst(degree)
        return share, -((degree.alone_median or {}).get(name) or 0.0)

    best = max(fitting, key=goodness)
    share, name = worst(best)
    median = (best.alone_median or {}).get(name)
    return (
        "no number of replicas helps: even where each request has the devices to itself, at most "
        f"{share:.1%} of them are within {name} {objective.slo[name]:g} s (at tensor_parallel_size="
        f"{best.tensor_parallel_size}"
        + ("" if median is None else f", where the median is {median:.4g} s")
        + f"), less than {objective.attainment:.1%}"
    )


def _degrees(settings: Settings, asked: Sequence[int] | None, max_devices: int) -> list[int]:
    num_heads = settings.deployment.model.num_heads
    if asked is None:
        return [degree for degree in range(1, min(num_heads, max_devices) + 1) if num_heads % degree == 0]
    for degree in asked:
        checked_int("tensor_parallel_size", degree, low=1)
        if degree > max_devices:
            raise InvalidArgumentError(f"tensor_parallel_size must be at most max_devices, {max_devices}, got {degree}")
        if num_heads % degree:
            raise InvalidArgumentError(
                f"tensor_parallel_size must divide the {num_heads} heads of {settings.deployment.model.name}, got "
                f"{degree}"
            )
    return sorted(set(asked))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
