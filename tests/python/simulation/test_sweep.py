"""Sweeps: the forms they are written in, and what is refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from steploop.errors import InvalidArgumentError
from steploop.simulation.sweep import Sweep, parse_sweep, with_value

OPTIONS: dict[str, Any] = {
    "max_num_seqs": (int, None),
    "speedup": (float, None),
    "scheduling_policy": (str, ("on_demand", "static")),
    "arrivals": (str, None),
}


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("max-num-seqs=8,16,32", "max_num_seqs", (8, 16, 32)),
        ("--max-num-seqs=8", "max_num_seqs", (8,)),
        ("max_num_seqs=1..8", "max_num_seqs", (1, 2, 4, 8)),
        ("max_num_seqs=3..20", "max_num_seqs", (3, 6, 12)),
        ("max_num_seqs=2..8:3", "max_num_seqs", (2, 5, 8)),
        ("rate=0.5..4", "rate", (0.5, 1, 2, 4)),
        ("rate=0.1..0.5:0.1", "rate", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("scheduling-policy=static, on_demand", "scheduling_policy", ("static", "on_demand")),
        ("arrivals=poisson:2,burst", "arrivals", ("poisson:2", "burst")),
    ],
)
def test_forms(text: str, name: str, values: tuple[Any, ...]) -> None:
    sweep = parse_sweep(text, OPTIONS)
    assert sweep == Sweep(name, values)
    assert [type(value) for value in sweep.values] == [type(value) for value in sweep.values[:1]] * len(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate", "a sweep must have the form NAME=VALUES, got 'rate'"),
        ("rate=", "a sweep must have the form NAME=VALUES"),
        ("max-num-seq=1", "did you mean max_num_seqs?"),
        ("max_num_seqs=1,x", "max_num_seqs must be an integer, got 'x'"),
        ("max_num_seqs=1..4:0.5", "max_num_seqs must be an integer, got '1.5'"),
        ("rate=fast", "rate must be a number, got 'fast'"),
        ("scheduling_policy=fifo", "scheduling_policy must be one of on_demand, static, got 'fifo'"),
        ("scheduling_policy=a..b", "only numbers have a range"),
        ("rate=1..x", "a range must have the form LOW..HIGH or LOW..HIGH:STEP, got '1..x'"),
        ("rate=0..4", "a range must go up from a number > 0, in steps > 0, got '0..4'"),
        ("rate=4..1", "a range must go up from a number > 0"),
        ("rate=1..4:-1", "in steps > 0"),
        ("rate=1..inf", "a range must go up from a number > 0"),
        ("rate=1..1000000:0.1", "a sweep must have at most 1000 values"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_sweep(text, OPTIONS)
    assert words in str(caught.value)


def test_with_value() -> None:
    arguments = argparse.Namespace(max_num_seqs=4, model="m")
    assert with_value(arguments, Sweep("max_num_seqs", (8,)), 8) == argparse.Namespace(max_num_seqs=8, model="m")
    assert with_value(arguments, Sweep("rate", (8.0,)), 8.0) == arguments
    assert arguments.max_num_seqs == 4
