"""Distributions of lengths in tokens. Each draws integers >= 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from steploop.checks import INT32_MAX, check_choice, check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.normal import normal_quantiles
from steploop.workload.ranks import MAX_RANKS, Ranks

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

CAP_MODES = ("redraw", "clip")


class Lengths(Protocol):
    """What lengths may be drawn from."""

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """`count` lengths; of the same generator state, the first so many of a longer draw."""
        ...


@dataclass(frozen=True)
class Cap:
    """A largest length, and what becomes of a longer one: drawn again until it fits ("redraw", which lowers all
    lengths a little), or cut ("clip", which heaps the longest ones at the cap)."""

    length: int
    mode: str

    def __post_init__(self) -> None:
        checked_int("a cap", self.length, low=1)
        check_choice("what becomes of lengths past the cap", self.mode, CAP_MODES)


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    length: int

    def __post_init__(self) -> None:
        checked_int("the length of fixed", self.length, low=1)

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths."""
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high`, both included, is as likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        checked_int("the low of uniform", self.low, low=1)
        checked_int("the high of uniform", self.high, low=1)
        if self.low > self.high:
            raise InvalidArgumentError(f"the low of uniform must be <= its high, got {self.low} and {self.high}")

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths."""
        return generator.integers(self.low, self.high, size=count, endpoint=True)


@dataclass(frozen=True)
class Exponential:
    """As if an answer ended at each token with the same probability. `mean` is that of the distribution without a cap,
    before it is rounded to whole tokens, one at least."""

    mean: float
    cap: Cap | None = None

    def __post_init__(self) -> None:
        check_positive("the mean of exponential", self.mean)

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths."""
        share_below_cap = 1.0 if self.cap is None else _exponential_cdf(_redraw_limit(self.cap) / self.mean)
        return _whole(-self.mean * np.log1p(-generator.random(count) * share_below_cap), self.cap)


@dataclass(frozen=True)
class LogNormal:
    """The logarithm is normal, with standard deviation `sigma`: many short, few very long. `median` is that of the
    distribution without a cap, before it is rounded to whole tokens, one at least."""

    median: float
    sigma: float
    cap: Cap | None = None

    def __post_init__(self) -> None:
        check_positive("the median of lognormal", self.median)
        check_positive("the sigma of lognormal", self.sigma)

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths."""
        share_below_cap = 1.0
        if self.cap is not None:
            share_below_cap = NormalDist().cdf(math.log(_redraw_limit(self.cap) / self.median) / self.sigma)
        # Quantiles are of what lies strictly between 0 and 1.
        deviations = normal_quantiles(np.clip(generator.random(count) * share_below_cap, 1e-300, 1 - 2**-53))
        with np.errstate(over="ignore"):  # _whole refuses what is too long
            return _whole(self.median * np.exp(self.sigma * deviations), self.cap)


@dataclass(frozen=True)
class Zipf:
    """From 1 to `longest`: length k in proportion to 1 / k^exponent, so that the shortest is the likeliest."""

    exponent: float
    longest: int

    def __post_init__(self) -> None:
        check_positive("the exponent of zipf", self.exponent)
        checked_int("the longest of zipf", self.longest, low=1, high=MAX_RANKS)

    @property
    def mean(self) -> float:
        """Of the distribution."""
        return Ranks(self.longest, self.exponent).mean

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths."""
        return Ranks(self.longest, self.exponent).draw(generator, count) + 1


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths that were measured, in their order; the generator is left alone."""

    lengths: Sequence[int] | npt.NDArray[np.integer[Any]]
    source: str
    """Where they come from, for messages."""

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """See Lengths.

        Raises:
            InvalidArgumentError: there are not so many.
        """
        if count > len(self.lengths):
            raise InvalidArgumentError(
                f"{self.source} has lengths for {len(self.lengths)} requests, not for the {count} asked for"
            )
        return np.array(self.lengths[:count], dtype=np.int64)


def _redraw_limit(cap: Cap) -> float:
    """What values must stay below so that they round to no more than the cap. Drawing below it at once gives the same
    distribution as drawing again and again, in one draw each."""
    return cap.length + 0.5 if cap.mode == "redraw" else math.inf


def _exponential_cdf(value: float) -> float:
    return -math.expm1(-value)


def _whole(values: FloatArray, cap: Cap | None) -> IntArray:
    longest = INT32_MAX if cap is None else cap.length
    if cap is None and values.max(initial=0.0) > longest:
        raise InvalidArgumentError(f"a length of {values.max():.3g} tokens was drawn; give the distribution a cap")
    return np.clip(np.rint(values), 1, longest).astype(np.int64)
