"""Ranks: numbers of which the first may be likelier than the others, by Zipf's law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steploop.checks import as_finite, checked_int
from steploop.errors import InvalidArgumentError

MAX_RANKS = 2**24
"""Most ranks there may be: there is a table of them."""


@dataclass(frozen=True)
class Ranks:
    """The numbers from 0 to `count` - 1, number k in proportion to 1 / (k + 1)^exponent."""

    count: int
    exponent: float = 0.0
    """0: all as likely."""

    def __post_init__(self) -> None:
        checked_int("how many there are to choose from", self.count, low=1, high=MAX_RANKS)
        exponent = as_finite(self.exponent)
        if exponent is None or exponent < 0:
            raise InvalidArgumentError(
                f"the exponent of Zipf's law must be a finite number >= 0, got {self.exponent!r}"
            )

    @property
    def mean(self) -> float:
        """Of the distribution, the ranks counted from 1."""
        weights = self._weights()
        return float((np.arange(1, self.count + 1) * weights).sum() / weights.sum())

    def draw(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """`count` of them; of the same generator state, the first so many of a longer draw."""
        below = np.cumsum(self._weights())
        shares = generator.random(count) * below[-1]
        ranks: npt.NDArray[np.int64] = np.minimum(np.searchsorted(below, shares, side="right"), self.count - 1)
        return ranks

    def _weights(self) -> npt.NDArray[np.float64]:
        weights: npt.NDArray[np.float64] = np.arange(1, self.count + 1, dtype=np.float64) ** -self.exponent
        return weights
