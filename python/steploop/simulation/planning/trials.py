"""Trials: one simulation of a plan's search, and whether it meets the objective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steploop.checks import check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.loadtest.slo import check_slo
from steploop.simulation.costs import Deployment
from steploop.simulation.figures import FloatArray, kv_cache_use, request_latencies, share_of_slots, within
from steploop.simulation.settings import Settings
from steploop.simulation.simulation import SimulationResult
from steploop.workload import Workload

MIN_REQUESTS, MAX_REQUESTS = 2000, 20_000
COVERED_SECONDS = 300
MOST_BACKLOG_GROWTH = 0.02
CHANCE = 3.0
"""So many square roots of the requests in flight may they grow besides: as much as random arrivals explain."""
_SECONDS_APART = 1e5  # of requests that are each alone


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a plan must meet.

    Raises:
        InvalidArgumentError: an unknown or bad limit, or a share that is not in (0, 1].
    """

    slo: dict[str, float]
    """Limits in seconds by name (`steploop.loadtest.slo.SLO_NAMES`)."""
    attainment: float = 0.99
    """At least this share of the requests must be within all of them."""

    def __post_init__(self) -> None:
        check_slo(self.slo)
        if isinstance(self.attainment, bool) or not 0 < self.attainment <= 1:
            raise InvalidArgumentError(f"attainment must be in (0, 1], got {self.attainment!r}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """So many engines, each on so many devices."""

    tensor_parallel_size: int
    num_replicas: int

    @property
    def num_devices(self) -> int:
        """In all."""
        return self.tensor_parallel_size * self.num_replicas


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a step of each engine."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a simulation came to.

    It is good if both all requests and the later half of them, by arrival, attain the objective, and the backlog does
    not grow. Nothing is left out as a warm-up: an empty system flatters the first requests, which is why the later
    half must attain it by itself.
    """

    layout: Layout
    limits: Limits
    num_kv_blocks: int
    """Of each replica."""
    rate: float
    num_requests: int
    attainment: float
    """Share of the requests within all limits: of all or of the later half, whichever is less."""
    share_within: dict[str, float]
    """The same by limit."""
    p99: dict[str, float | None]
    """Seconds by limit; of itl: of the longest wait of each request. None: no request has such a latency."""
    pressure: float
    """The latency that the share asked for is within, over its limit; of the limit where that is most. <= 1 is good."""
    backlog_growth: float
    """Requests that came from the middle of the second quarter to that of the last (by arrival) and were not served
    meanwhile, as a share of those that came."""
    most_backlog_growth: float
    """MOST_BACKLOG_GROWTH, and what chance explains. Where the backlog grows by more, the system does not keep up,
    however short the workload and however long the limits."""
    share_of_slots: float
    kv_use: float
    num_preemptions: int
    good: bool


class Trials:
    """Runs the simulations of a plan; each once."""

    def __init__(
        self,
        settings: Settings,
        objective: Objective,
        *,
        num_requests: int | None = None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        if num_requests is not None:
            checked_int("num_requests", num_requests, low=1)
        self.settings = settings
        self.objective = objective
        self._num_requests = num_requests or settings.source.num_recorded
        self._report = report
        self._workloads: dict[float, Workload] = {}
        self._trials: dict[tuple[Any, ...], Trial] = {}

    @property
    def all(self) -> list[Trial]:
        """All candidates so far."""
        return list(self._trials.values())

    def num_requests(self, rate: float) -> int:
        """How many are drawn: as many as were asked for or are recorded; else those of COVERED_SECONDS, but at least
        MIN_REQUESTS and at most MAX_REQUESTS."""
        if self._num_requests is not None:
            return self._num_requests
        return min(max(MIN_REQUESTS, math.ceil(rate * COVERED_SECONDS)), MAX_REQUESTS)

    def workload(self, rate: float) -> Workload:
        """Drawn with this rate; lengths are the same for every rate."""
        check_positive("the rate of arrivals", rate)
        if rate not in self._workloads:
            self._workloads = {rate: self.settings.source.draw(self.num_requests(rate), rate=rate)}
        return self._workloads[rate]

    def deployment(self, degree: int) -> Deployment:
        """On so many devices."""
        return dataclasses.replace(self.settings.deployment, tensor_parallel_size=degree)

    def settings_of(self, layout: Layout, limits: Limits, num_kv_blocks: int | None = None) -> Settings:
        """The settings with these; `num_kv_blocks` None: as they are."""
        engine = dataclasses.replace(
            self.settings.engine,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        if num_kv_blocks is not None:
            engine = dataclasses.replace(engine, num_kv_blocks=num_kv_blocks, kv_cache_memory_bytes=None)
        return dataclasses.replace(
            self.settings,
            deployment=self.deployment(layout.tensor_parallel_size),
            engine=engine,
            num_replicas=layout.num_replicas,
        )

    def simulate(
        self, layout: Layout, limits: Limits, rate: float, num_kv_blocks: int | None = None
    ) -> SimulationResult:
        """Runs it."""
        result = self.settings_of(layout, limits, num_kv_blocks).run(self.workload(rate))
        self._report()
        return result

    def run(self, layout: Layout, limits: Limits, rate: float, num_kv_blocks: int | None = None) -> Trial:
        """Runs it, unless it has been run, and judges it."""
        key = (layout, limits, rate, num_kv_blocks)
        if key not in self._trials:
            self._trials[key] = self.run_aside(layout, limits, rate, num_kv_blocks)
        return self._trials[key]

    def run_aside(self, layout: Layout, limits: Limits, rate: float, num_kv_blocks: int | None = None) -> Trial:
        """The same of what is no candidate, such as limits that nobody may have: it is not among `all`."""
        result = self.simulate(layout, limits, rate, num_kv_blocks)
        return judge(result, self.objective, layout=layout, limits=limits, rate=rate)

    def run_alone(self, degree: int, limits: Limits, rate: float) -> SimulationResult:
        """The first of the requests, each as if there were no other: no number of replicas is faster."""
        count = min(self.num_requests(rate), MIN_REQUESTS // 2)
        workload = self.settings.source.draw(count, rate=rate)
        workload = dataclasses.replace(workload, arrival_times=np.arange(count, dtype=np.float64) * _SECONDS_APART)
        result = self.settings_of(Layout(tensor_parallel_size=degree, num_replicas=1), limits).run(workload)
        self._report()
        return result


def judge(result: SimulationResult, objective: Objective, *, layout: Layout, limits: Limits, rate: float) -> Trial:
    """See Trial."""
    latencies = request_latencies(result)
    attainment = _lesser_share(within(latencies, objective.slo))
    growth, most_growth = _growth(latencies, result.arrival_us / 1e6)
    return Trial(
        layout=layout,
        limits=limits,
        num_kv_blocks=result.num_kv_blocks,
        rate=rate,
        num_requests=len(result.workload),
        attainment=attainment,
        share_within=shares_within(latencies, objective.slo),
        p99={name: _quantile(latencies[name], 0.99) for name in objective.slo},
        pressure=max(
            (_quantile(latencies[name], objective.attainment) or 0.0) / limit for name, limit in objective.slo.items()
        ),
        backlog_growth=growth,
        most_backlog_growth=most_growth,
        share_of_slots=share_of_slots(result),
        kv_use=kv_cache_use(result),
        num_preemptions=result.total("num_preemptions"),
        good=attainment >= objective.attainment and growth <= most_growth,
    )


def shares_within(latencies: dict[str, FloatArray], slo: dict[str, float]) -> dict[str, float]:
    """By limit, of all requests or the later half, whichever is less."""
    return {name: _lesser_share(within(latencies, {name: limit})) for name, limit in slo.items()}


def _growth(latencies: dict[str, FloatArray], arrived: FloatArray) -> tuple[float, float]:
    """Of requests in flight; where these become more because the first have hardly ended, however fast
    they are served, those without a first token."""
    fills_up = np.quantile(latencies["e2e"], 0.99) > (arrived[-1] - arrived[0]) / 4
    return backlog_growth(latencies["ttft" if fills_up else "e2e"], arrived)


def backlog_growth(latency: FloatArray, arrived: FloatArray) -> tuple[float, float]:
    """How much of what comes is not served, < 0 where there is less to do in the end; and how much may be. See Trial.

    Args:
        latency, arrived: Seconds by request, in the order in which they arrive; at least 4.
    """
    count = len(arrived)
    waiting = np.arange(1, count + 1) - np.searchsorted(np.sort(arrived + latency), arrived, side="right")
    quarter = count // 4
    before, after = waiting[quarter : 2 * quarter].mean(), waiting[-quarter:].mean()
    came = 2 * quarter
    return float((after - before) / came), MOST_BACKLOG_GROWTH + CHANCE * math.sqrt(before) / came


def _lesser_share(good: Any) -> float:
    return float(min(good.mean(), good[len(good) // 2 :].mean()))


def _quantile(values: FloatArray, share: float) -> float | None:
    values = values[~np.isnan(values)]
    return float(np.quantile(values, share)) if len(values) else None
