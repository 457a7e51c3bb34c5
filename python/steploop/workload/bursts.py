"""MarkovModulated: arrivals that change between a calm and a busy rate at random."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steploop.checks import as_finite, check_positive
from steploop.errors import InvalidArgumentError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_MAX_STATES = 2e7
"""Changes of state in a draw; with more, the arrays of them would not fit."""


@dataclass(frozen=True)
class MarkovModulated:
    """A Poisson process whose rate is now `rate`, now `burst_rate`; how long each lasts is exponential.

    It begins at a moment like any other (calm or not by the shares of time), and the first arrival after it is the one
    at 0. What is drawn is not scaled to the mean rate: of few arrivals the rate may be far from it.
    """

    rate: float
    """Requests a second while it is calm; 0: none."""
    burst_rate: float
    """In a burst."""
    mean_calm: float
    """Seconds from burst to burst."""
    mean_burst: float
    """Seconds of a burst."""

    def __post_init__(self) -> None:
        rate = as_finite(self.rate)
        if rate is None or rate < 0:
            raise InvalidArgumentError(f"the calm rate of mmpp must be a finite number >= 0, got {self.rate!r}")
        check_positive("the burst rate of mmpp", self.burst_rate)
        for name in ("calm", "burst"):
            check_positive(f"the mean seconds of mmpp's {name}", getattr(self, f"mean_{name}"))
        if self.rate > self.burst_rate:
            raise InvalidArgumentError(
                f"the burst rate of mmpp must be >= the calm rate, got {self.burst_rate:g} and {self.rate:g}"
            )

    @property
    def mean_rate(self) -> float:
        """See Arrivals."""
        return self._mean_in_both / (self.mean_calm + self.mean_burst)

    @property
    def _mean_in_both(self) -> float:
        """Arrivals in a calm and a burst."""
        return self.rate * self.mean_calm + self.burst_rate * self.mean_burst

    def with_rate(self, rate: float) -> MarkovModulated:
        """See Arrivals: both rates change by the same factor, and the states last as long."""
        check_positive("the rate of arrivals", rate)
        factor = rate / self.mean_rate
        return dataclasses.replace(self, rate=self.rate * factor, burst_rate=self.burst_rate * factor)

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """See Arrivals."""
        return self.draw_with_states(generator, count)[0]

    def draw_with_states(self, generator: np.random.Generator, count: int) -> tuple[FloatArray, BoolArray]:
        """The times, and which of them are in bursts.

        Raises:
            InvalidArgumentError: the states are too short to be followed.
        """
        of_states, of_gaps = generator.spawn(2)
        # Time is stretched so that the rate is 1 throughout, and gaps are exponential; then back to seconds.
        stretched = np.cumsum(of_gaps.standard_exponential(count))
        begins_in_burst = bool(of_states.random() < self.mean_burst / (self.mean_calm + self.mean_burst))
        seconds, edges = self._states(of_states, begins_in_burst, until=float(stretched[-1]) if count else 0.0)
        state = np.searchsorted(edges, stretched, side="right") - 1
        times = np.maximum.accumulate(np.interp(stretched, edges, seconds))
        return times - times[:1], (state % 2 == 1) != begins_in_burst

    def _states(
        self, generator: np.random.Generator, begins_in_burst: bool, *, until: float
    ) -> tuple[FloatArray, FloatArray]:
        """Where the states begin, in seconds and in stretched time, up to one past `until` of the latter."""
        if 2 * until > _MAX_STATES * self._mean_in_both:
            raise InvalidArgumentError(
                "the states of mmpp are too short beside the gaps between arrivals; poisson is what they come to"
            )
        means, rates = np.array([self.mean_calm, self.mean_burst]), np.array([self.rate, self.burst_rate])
        if begins_in_burst:
            means, rates = means[::-1], rates[::-1]
        num_pairs = int(1.1 * until / self._mean_in_both) + 16
        durations = np.empty((0, 2))
        while (durations @ rates).sum() <= until:
            durations = np.concatenate((durations, generator.standard_exponential((num_pairs, 2)) * means))
        seconds, stretched = (
            np.concatenate(([0.0], np.cumsum(column))) for column in (durations.ravel(), (durations * rates).ravel())
        )
        return seconds, stretched
