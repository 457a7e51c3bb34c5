"""Distributions of lengths: their moments, their caps, and what they refuse."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steploop.errors import InvalidArgumentError
from steploop.workload import Cap, Exponential, Fixed, LogNormal, RecordedLengths, Uniform, Zipf, parse_lengths
from steploop.workload.normal import normal_quantiles
from steploop.workload.specs import LENGTH_FORMS

COUNT = 100_000


def draw(text: str, count: int = COUNT, seed: int = 1) -> Any:
    return parse_lengths(text).draw(np.random.default_rng(seed), count)


def test_fixed() -> None:
    assert set(draw("fixed:7", 10).tolist()) == {7}


def test_uniform() -> None:
    lengths = draw("uniform:10:20")
    assert set(lengths.tolist()) == set(range(10, 21))
    assert lengths.mean() == pytest.approx(15, rel=0.01)
    assert set(draw("uniform:5:5", 10).tolist()) == {5}


def test_exponential() -> None:
    lengths = draw("exponential:128")
    assert lengths.min() == 1
    assert lengths.mean() == pytest.approx(128, rel=0.02)
    assert lengths.std() == pytest.approx(128, rel=0.02)
    assert np.median(lengths) == pytest.approx(128 * math.log(2), rel=0.02)


def test_lognormal() -> None:
    lengths = draw("lognormal:200:0.8")
    assert np.median(lengths) == pytest.approx(200, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)
    assert lengths.mean() == pytest.approx(200 * math.exp(0.8**2 / 2), rel=0.02)


@pytest.mark.parametrize(("exponent", "longest"), [(0.5, 40), (1.0, 1000), (2.5, 8), (1.2, 1)])
def test_zipf(exponent: float, longest: int) -> None:
    """Chi-square over all lengths, those that are rare put together."""
    lengths = draw(f"zipf:{exponent}:{longest}")
    weights = np.arange(1, longest + 1) ** -exponent
    expected = COUNT * weights / weights.sum()
    counts = np.bincount(lengths, minlength=longest + 1)[1:]
    assert len(counts) == longest
    bins = np.cumsum(expected >= 10)
    counts, expected = np.bincount(bins, counts)[1:], np.bincount(bins, expected)[1:]
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert abs(chi_square - freedom) <= 4 * math.sqrt(2 * freedom) + 1e-6
    assert lengths.mean() == pytest.approx(Zipf(exponent, longest).mean, rel=0.02)


def test_quantiles_are_those_of_the_standard_library() -> None:
    shares = np.concatenate(
        (np.linspace(0.0005, 0.9995, 1000), 10.0 ** -np.arange(1, 301), 1 - 2.0 ** -np.arange(1, 54))
    )
    exact = [NormalDist().inv_cdf(share) for share in shares]
    assert normal_quantiles(shares) == pytest.approx(exact, rel=1e-14, abs=1e-300)
    assert normal_quantiles(np.array([])).tolist() == []


@pytest.mark.parametrize("name", ["exponential:128", "lognormal:128:1"])
def test_clip_heaps_at_the_cap_and_redraw_does_not(name: str) -> None:
    free, clipped, redrawn = draw(name), draw(f"{name}:256:clip"), draw(f"{name}:256:redraw")
    assert clipped.tolist() == np.minimum(free, 256).tolist()
    assert redrawn.max() == 256
    assert (redrawn == 256).mean() < 0.01 < (clipped == 256).mean()
    # The same distribution as drawing until it fits.
    fitting = free[free <= 256]
    assert redrawn.mean() == pytest.approx(fitting.mean(), rel=0.02)
    assert np.percentile(redrawn, [10, 50, 90, 99]) == pytest.approx(np.percentile(fitting, [10, 50, 90, 99]), rel=0.05)


@given(
    st.one_of(
        st.builds(
            Exponential, st.floats(1e-3, 1e6), st.builds(Cap, st.integers(1, 1000), st.sampled_from(["redraw", "clip"]))
        ),
        st.builds(
            LogNormal,
            st.floats(1e-3, 1e6),
            st.floats(1e-3, 50),
            st.builds(Cap, st.integers(1, 1000), st.sampled_from(["redraw", "clip"])),
        ),
        st.builds(lambda low, more: Uniform(low, low + more), st.integers(1, 1000), st.integers(0, 1000)),
        st.builds(Zipf, st.floats(1e-3, 1e300), st.integers(1, 1000)),
    ),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_any_draw_is_within_bounds_and_begins_a_longer_one(lengths: Any, count: int, more: int) -> None:
    drawn = lengths.draw(np.random.default_rng(3), count)
    assert len(drawn) == count
    assert all(
        1
        <= length
        <= (lengths.cap.length if hasattr(lengths, "cap") else getattr(lengths, "high", None) or lengths.longest)
        for length in drawn
    )
    assert lengths.draw(np.random.default_rng(3), count + more)[:count].tolist() == drawn.tolist()


def test_forms_in_the_messages_are_what_is_read() -> None:
    for form in LENGTH_FORMS.values():
        for text in (form.partition("[")[0], form.replace("[", "").replace("]", "").replace("|clip", "")):
            numbers = {
                "SIGMA": "1",
                "LOW": "2",
                "HIGH": "4",
                "MEDIAN": "8",
                "MEAN": "8",
                "CAP": "16",
                "N": "3",
                "EXPONENT": "1.5",
                "MAX": "9",
            }
            for name, number in numbers.items():
                text = text.replace(f":{name}", f":{number}")
            parse_lengths(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gaussian:3", "must be one of fixed:N, uniform:LOW:HIGH, exponential:MEAN"),
        ("expnential:3", "did you mean exponential:MEAN"),
        ("Uniform:3:4", "did you mean uniform:LOW:HIGH"),
        ("", "must be one of fixed:N"),
        ("fixed", "'fixed' must have the form fixed:N"),
        ("fixed:1:2", "must have the form fixed:N"),
        ("fixed:0", "must be >= 1, got 0"),
        ("fixed:-4", "must be >= 1, got -4"),
        ("fixed:1.5", "must be an integer, got '1.5'"),
        ("fixed:99999999999", "must be <= 2147483647"),
        ("uniform:1", "must have the form uniform:LOW:HIGH"),
        ("uniform:0:4", "the low of uniform must be >= 1, got 0"),
        ("uniform:9:4", "must be <= its high, got 9 and 4"),
        ("exponential:nan", "the mean of exponential must be a finite number > 0, got nan"),
        ("exponential:inf", "must be a finite number > 0, got inf"),
        ("exponential:0", "must be a finite number > 0, got 0.0"),
        ("exponential:-1", "must be a finite number > 0, got -1.0"),
        ("exponential:x", "must be a number, got 'x'"),
        ("exponential:8:16", "must say what becomes of longer lengths, :redraw or :clip"),
        ("exponential:8:16:cut", "must be one of redraw, clip, got 'cut'"),
        ("exponential:8:0:clip", "a cap must be >= 1, got 0"),
        ("exponential:8:16:clip:1", "must have the form exponential:MEAN"),
        ("lognormal:8", "must have the form lognormal:MEDIAN:SIGMA"),
        ("lognormal:8:0", "the sigma of lognormal must be a finite number > 0"),
        ("lognormal:nan:1", "the median of lognormal must be a finite number > 0"),
        ("zipf:1", "must have the form zipf:EXPONENT:MAX"),
        ("zipf:0:8", "the exponent of zipf must be a finite number > 0, got 0.0"),
        ("zipf:1:0", "the longest of zipf must be >= 1, got 0"),
        ("zipf:1:1e3", "the longest of zipf must be an integer, got '1e3'"),
        ("zipf:1:99999999", "the longest of zipf must be <= 16777216"),
        ("zip:1:8", "did you mean zipf:EXPONENT:MAX?"),
        ("lognormal:8:1:16", "must say what becomes of longer lengths"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_lengths(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absurd_draws_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="give the distribution a cap"):
        draw("lognormal:1000:50", 1000)
    assert draw("lognormal:1000:1e300:10:clip", 100).max() == 10


def test_recorded() -> None:
    recorded = RecordedLengths([3, 1, 2], "a.csv")
    assert recorded.draw(np.random.default_rng(0), 2).tolist() == [3, 1]
    with pytest.raises(InvalidArgumentError, match="a.csv has lengths for 3 requests, not for the 4 asked for"):
        recorded.draw(np.random.default_rng(0), 4)


def test_made_by_hand_they_check_as_well() -> None:
    for make in (lambda: Fixed(0), lambda: Uniform(2, 1), lambda: Exponential(math.nan), lambda: Cap(4, "cut")):
        with pytest.raises(InvalidArgumentError):
            make()
