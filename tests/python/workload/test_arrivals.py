"""Arrival processes: their rates and spreads, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import Gamma, parse_arrivals

COUNT = 100_000


def draw(text: str, count: int = COUNT, seed: int = 1) -> Any:
    return parse_arrivals(text).draw(np.random.default_rng(seed), count)


def test_burst() -> None:
    assert draw("burst", 5).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("text", "rate", "burstiness"), [("poisson:4", 4, 1), ("gamma:10:0.25", 10, 0.25), ("gamma:0.5:9", 0.5, 9)]
)
def test_rate_and_spread(text: str, rate: float, burstiness: float) -> None:
    times = draw(text)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert (COUNT - 1) / times[-1] == pytest.approx(rate)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_poisson_is_gamma_of_burstiness_1_and_counts_are_poisson() -> None:
    times = draw("poisson:50")
    assert times.tolist() == draw("gamma:50:1").tolist()
    counts = np.bincount(times.astype(int))[:-1]  # arrivals in each second
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)


def test_another_rate_scales_the_same_times() -> None:
    assert draw("poisson:8", 100) == pytest.approx(draw("poisson:2", 100) / 4)


@pytest.mark.parametrize("count", [1, 2])
def test_few(count: int) -> None:
    assert draw("poisson:4", count).tolist() == [0.0, 0.25][:count]


def test_gaps_that_are_too_small_to_tell() -> None:
    """Of a burstiness near 0 most gaps underflow."""
    times = draw("gamma:2:1e-9", 5)
    assert np.isfinite(times).all() and (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poison:1", "must be one of burst, poisson:RATE, gamma:RATE:BURSTINESS, file:PATH, got 'poison'"),
        ("poison:1", "did you mean poisson:RATE?"),
        ("burst:1", "must have the form burst"),
        ("poisson", "must have the form poisson:RATE"),
        ("poisson:1:2", "must have the form poisson:RATE"),
        ("poisson:-1", "the rate of arrivals must be a finite number > 0, got -1.0"),
        ("poisson:0", "must be a finite number > 0, got 0.0"),
        ("poisson:nan", "must be a finite number > 0, got nan"),
        ("poisson:inf", "must be a finite number > 0, got inf"),
        ("poisson:fast", "the rate of arrivals must be a number, got 'fast'"),
        ("gamma:1", "must have the form gamma:RATE:BURSTINESS"),
        ("gamma:1:0", "the burstiness of arrivals must be a finite number > 0, got 0.0"),
        ("file:", "must have the form file:PATH"),
        ("file:/no/such/file", "/no/such/file cannot be read"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_arrivals(text)
    assert words in str(caught.value)


def test_made_by_hand_they_check_as_well() -> None:
    with pytest.raises(InvalidArgumentError, match="rate"):
        Gamma(True)
