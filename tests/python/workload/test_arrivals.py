"""Arrival processes: their rates and spreads, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import Gamma, MarkovModulated, RecordedArrivals, parse_arrivals

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


@pytest.mark.parametrize(
    ("rate", "burst_rate", "mean_calm", "mean_burst"),
    [(2, 40, 10, 1), (0, 5, 4, 4), (3, 3, 1, 2), (1, 100, 0.02, 0.01)],
)
def test_mmpp(rate: float, burst_rate: float, mean_calm: float, mean_burst: float) -> None:
    """Its rate, its share in bursts, and the variance of counts in windows of several lengths, which follows from both
    rates and how long the states last (W. Fischer and K. Meier-Hellstern, "The Markov-modulated Poisson process
    cookbook", Performance Evaluation 18, 1993)."""
    process = MarkovModulated(rate, burst_rate, mean_calm, mean_burst)
    times, in_burst = process.draw_with_states(np.random.default_rng(5), 1_000_000)
    assert times[0] == 0
    assert np.diff(times).min() >= 0
    share = mean_burst / (mean_calm + mean_burst)
    mean_rate = rate * (1 - share) + burst_rate * share
    assert process.mean_rate == pytest.approx(mean_rate)
    assert len(times) / times[-1] == pytest.approx(mean_rate, rel=0.02)
    assert in_burst.mean() == pytest.approx(burst_rate * share / mean_rate, abs=0.01)
    change = 1 / mean_calm + 1 / mean_burst
    spread = 2 * (1 - share) * share * (burst_rate - rate) ** 2 / (mean_rate * change)
    for window in (0.3 * mean_calm, mean_calm + mean_burst, 4 * (mean_calm + mean_burst)):
        counts = np.bincount((times / window).astype(int))[:-1]
        expected = 1 + spread * (1 + math.expm1(-change * window) / (change * window))
        assert counts.var() / counts.mean() == pytest.approx(expected, rel=0.06)


def test_mmpp_begins_at_any_moment() -> None:
    """The state at the first arrival is a burst as often as that of any arrival."""
    process = MarkovModulated(1, 9, 2, 0.5)
    first = [process.draw_with_states(np.random.default_rng(seed), 1)[1][0] for seed in range(4000)]
    # Of a stationary process the next arrival is in a burst with this probability (its two-state Markov chain).
    calm_to, burst_to, share = 1 / 2, 1 / 0.5, 0.5 / 2.5
    from_calm = calm_to / (1 + calm_to) * 9 / (9 + burst_to) / (1 - calm_to / (1 + calm_to) * burst_to / (9 + burst_to))
    from_burst = 9 / (9 + burst_to) / (1 - calm_to / (1 + calm_to) * burst_to / (9 + burst_to))
    assert np.mean(first) == pytest.approx(share * from_burst + (1 - share) * from_calm, abs=0.025)


def test_mmpp_of_another_rate_keeps_its_states() -> None:
    process = MarkovModulated(1, 9, 2, 0.5).with_rate(5.2)
    assert (process.rate, process.burst_rate) == pytest.approx((2, 18))
    assert (process.mean_calm, process.mean_burst) == (2, 0.5)
    assert process.mean_rate == pytest.approx(5.2)


def test_mmpp_of_states_too_short_to_follow() -> None:
    with pytest.raises(InvalidArgumentError, match="too short beside the gaps between arrivals"):
        draw("mmpp:1:9:1e-6:1e-6")


def test_rates() -> None:
    assert parse_arrivals("burst").mean_rate is None
    with pytest.raises(InvalidArgumentError, match="burst has no rate"):
        parse_arrivals("burst").with_rate(1)
    assert parse_arrivals("gamma:4:0.5").with_rate(2) == Gamma(2, 0.5)
    recorded = RecordedArrivals([5.0, 6.0, 9.0], "t.csv", speedup=2)
    generator = np.random.default_rng(0)
    assert recorded.mean_rate == 1
    assert recorded.draw(generator, 3).tolist() == [0, 0.5, 2]
    assert recorded.with_rate(0.25).draw(generator, 3).tolist() == [0, 2, 8]
    assert recorded.with_rate(0.25).mean_rate == 0.25
    for times in ([], [3.0], [3.0, 3.0]):
        assert RecordedArrivals(times, "t.csv").mean_rate is None
        with pytest.raises(InvalidArgumentError, match="t.csv has no rate"):
            RecordedArrivals(times, "t.csv").with_rate(1)
    for make in (lambda: recorded.with_rate(-1), lambda: RecordedArrivals([1.0], "t.csv", speedup=0)):
        with pytest.raises(InvalidArgumentError, match="must be a finite number > 0"):
            make()


@pytest.mark.parametrize("count", [1, 2])
def test_few(count: int) -> None:
    assert draw("poisson:4", count).tolist() == [0.0, 0.25][:count]


def test_gaps_that_are_too_small_to_tell() -> None:
    """Of a burstiness near 0 most gaps underflow; where all do, there is no rate."""
    times = draw("gamma:2:1e-3", 100)
    assert np.isfinite(times).all() and (np.diff(times) >= 0).all()
    with pytest.raises(InvalidArgumentError, match="burstiness 1e-09 is too small"):
        draw("gamma:2:1e-9", 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "poison:1",
            "must be one of burst, poisson:RATE, gamma:RATE:BURSTINESS, mmpp:RATE:BURST_RATE:MEAN_CALM:MEAN_BURST, "
            "file:PATH, got 'poison'",
        ),
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
        ("mmpp:1:2:3", "must have the form mmpp:RATE:BURST_RATE:MEAN_CALM:MEAN_BURST"),
        ("mmpp:-1:2:3:4", "the calm rate of mmpp must be a finite number >= 0, got -1.0"),
        ("mmpp:nan:2:3:4", "the calm rate of mmpp must be a finite number >= 0, got nan"),
        ("mmpp:0:0:3:4", "the burst rate of mmpp must be a finite number > 0, got 0.0"),
        ("mmpp:1:2:0:4", "the mean seconds of mmpp's calm must be a finite number > 0, got 0.0"),
        ("mmpp:1:2:3:inf", "the mean seconds of mmpp's burst must be a finite number > 0, got inf"),
        ("mmpp:2:1:3:4", "the burst rate of mmpp must be >= the calm rate, got 1 and 2"),
        ("mmpp:1:x:3:4", "each number of mmpp must be a number, got 'x'"),
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
