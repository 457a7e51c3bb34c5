"""When requests arrive: seconds from the first of them, which comes at 0."""

from __future__ import annotations

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

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """`count` times, none before the one before it; the first is 0."""
        ...


@dataclass(frozen=True)
class Burst:
    """All at once."""

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

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """See Arrivals. Another rate scales the same times."""
        gaps = generator.standard_gamma(self.burstiness, size=max(0, count - 1))
        times = np.concatenate(([0.0], np.cumsum(gaps)))[:count]
        if times[-1:] > 0:
            # As vLLM does: of few draws the mean gap may be far off, and they would be another load than asked for.
            times *= (count - 1) / self.rate / times[-1]
        return times


@dataclass(frozen=True)
class RecordedArrivals:
    """Times that were measured; the generator is left alone."""

    times: Sequence[float]
    """None before the one before it."""
    source: str
    """Where they come from, for messages."""

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
        return times - times[:1]
