"""When requests arrive: seconds from the first of them, which comes at 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steploop.checks import check_positive
from steploop.errors import InvalidArgumentError

FloatArray = npt.NDArray[np.float64]


class Arrivals(Protocol):
    """What arrival times may be drawn from."""

    @property
    def mean_rate(self) -> float | None:
        """Arrivals a second in the long run; None: they have no rate."""
        ...

    def with_rate(self, rate: float) -> Arrivals:
        """The same with this mean rate.

        Raises:
            InvalidArgumentError: they have no rate, or it is not one.
        """
        ...

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """`count` times, none before the one before it; the first is 0."""
        ...


@dataclass(frozen=True)
class Burst:
    """All at once."""

    @property
    def mean_rate(self) -> None:
        """See Arrivals."""
        return None

    def with_rate(self, rate: float) -> Arrivals:
        """See Arrivals."""
        raise InvalidArgumentError("burst has no rate: all come at once")

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """See Arrivals."""
        return np.zeros(count)


@dataclass(frozen=True)
class Gamma:
    """The gaps between arrivals follow a gamma distribution: `burstiness` is its shape, the mean gap 1 / `rate`, to
    which what is drawn is scaled.

    Burstiness 1 is a Poisson process; below 1 arrivals come in clusters, above 1 they are more even (the name and the
    direction are vLLM's: the smaller, the burstier). The coefficient of variation of the gaps is 1 / sqrt(burstiness).
    """

    rate: float
    """Requests a second."""
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            check_positive(f"the {name} of arrivals", getattr(self, name))

    @property
    def mean_rate(self) -> float:
        """See Arrivals."""
        return self.rate

    def with_rate(self, rate: float) -> Gamma:
        """See Arrivals."""
        return dataclasses.replace(self, rate=rate)

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """See Arrivals. Another rate scales the same times."""
        gaps = generator.standard_gamma(self.burstiness, size=max(0, count - 1))
        times = np.concatenate(([0.0], np.cumsum(gaps)))[:count]
        if count > 1 and not times[-1] > 0:
            raise InvalidArgumentError(f"burstiness {self.burstiness:g} is too small: all gaps come out as 0")
        if times[-1:] > 0:
            # As vLLM does: of few draws the mean gap may be far off, and they would be another load than asked for.
            times *= (count - 1) / self.rate / times[-1]
        return times


@dataclass(frozen=True)
class RecordedArrivals:
    """Times that were measured; the generator is left alone."""

    times: Sequence[float] | FloatArray
    """None before the one before it."""
    source: str
    """Where they come from, for messages."""
    speedup: float = 1.0
    """They are replayed so many times as fast."""

    def __post_init__(self) -> None:
        check_positive("the speedup of recorded arrivals", self.speedup)

    @property
    def mean_rate(self) -> float | None:
        """See Arrivals. That of all that was recorded."""
        duration = float(self.times[-1] - self.times[0]) if len(self.times) else 0.0
        return self.speedup * (len(self.times) - 1) / duration if duration > 0 else None

    def with_rate(self, rate: float) -> RecordedArrivals:
        """See Arrivals: faster or slower throughout."""
        check_positive("the rate of arrivals", rate)
        mean_rate = self.mean_rate
        if mean_rate is None:
            raise InvalidArgumentError(f"{self.source} has no rate: all its requests come at once")
        return dataclasses.replace(self, speedup=self.speedup * rate / mean_rate)

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """See Arrivals.

        Raises:
            InvalidArgumentError: there are not so many.
        """
        if count > len(self.times):
            raise InvalidArgumentError(
                f"{self.source} has times for {len(self.times)} requests, not for the {count} asked for"
            )
        times = np.array(self.times[:count], dtype=np.float64)
        return (times - times[:1]) / self.speedup
