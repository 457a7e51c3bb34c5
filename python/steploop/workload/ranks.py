"""Ranks of a bounded Zipf distribution: the k-th likeliest of so many comes up in proportion to 1 / k^exponent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_RANKS = 2**24
"""Most ranks there may be: there is a table of them."""


def draw_ranks(generator: np.random.Generator, count: int, num_ranks: int, exponent: float) -> npt.NDArray[np.int64]:
    """`count` ranks from 0 to `num_ranks` - 1; exponent 0: all as likely. Of the same generator state, the first so
    many of a longer draw."""
    below = np.cumsum(np.arange(1, num_ranks + 1, dtype=np.float64) ** -exponent)
    shares = generator.random(count) * below[-1]
    return np.minimum(np.searchsorted(below, shares, side="right"), num_ranks - 1).astype(np.int64, copy=False)


def mean_rank(num_ranks: int, exponent: float) -> float:
    """The mean of the ranks, counted from 1."""
    ranks = np.arange(1, num_ranks + 1, dtype=np.float64)
    weights = ranks**-exponent
    return float((ranks * weights).sum() / weights.sum())
