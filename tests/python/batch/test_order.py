"""Who starts first, and what that is good for."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import numpy as np
import pytest

from steploop.batch.order import ORDERS, order_lines
from steploop.cli import make_parser

Line = tuple[int, int]
"""(expected tokens, prefix)"""


def ordered(order: str, lines: list[Line], num_slots: int = 4) -> list[Line]:
    expected = np.array([one for one, _ in lines], np.int64)
    prefix = np.array([one for _, one in lines], np.uint64)
    return [lines[index] for index in order_lines(order, expected, prefix, expected + 1, num_slots)]


def duration(lines: list[Line], num_slots: int) -> int:
    """Steps until all have ended, if each starts as soon as a slot is free."""
    ends = [0] * num_slots
    for length, _ in lines:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def num_changes(lines: list[Line]) -> int:
    """How often a line begins unlike the one before it."""
    return sum(one[1] != other[1] for one, other in pairwise(lines))


def draw_lines(num_lines: int, num_prefixes: int) -> list[Line]:
    generator = random.Random(num_lines)
    return [
        (1 + min(400, round(generator.expovariate(1 / 50))), generator.randrange(num_prefixes))
        for _ in range(num_lines)
    ]


LINES = [(5, 7), (100, 2**63), (6, 2**63), (70, 7), (120, 7), (4, 7), (7, 7), (128, 3), (0, 7)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("input", LINES),
        ("longest", sorted(LINES, reverse=True)),
        ("prefix", sorted(LINES, key=lambda line: (line[1], -line[0]))),
        ("grouped", [(128, 3), (120, 7), (70, 7), (7, 7), (5, 7), (4, 7), (0, 7), (100, 2**63), (6, 2**63)]),
    ],
)
def test_orders(order: str, expected: list[Line]) -> None:
    assert ordered(order, LINES, num_slots=2) == expected


@pytest.mark.parametrize("num_slots", [8, 32])
@pytest.mark.parametrize(("num_lines", "num_prefixes"), [(200, 30), (1000, 4), (1000, 200), (20000, 1000)])
def test_grouped_has_a_short_end_and_few_changes(num_lines: int, num_prefixes: int, num_slots: int) -> None:
    lines = draw_lines(num_lines, num_prefixes)
    grouped, longest, by_prefix = (ordered(order, lines, num_slots) for order in ("grouped", "longest", "prefix"))
    assert sorted(grouped) == sorted(lines)
    assert duration(grouped, num_slots) <= 1.1 * duration(longest, num_slots)
    assert num_changes(grouped) <= 2 * num_changes(by_prefix)
    assert num_changes(grouped) < num_changes(longest) / 4


def test_lines_that_would_run_on_come_first() -> None:
    lines = [(60, 1), *[(50, 1)] * 20, (59, 2), *[(5, 2)] * 10, (58, 3)]
    assert ordered("grouped", lines, 2) == lines  # groups, by their longest
    assert ordered("grouped", lines, 8) == [(59, 2), (58, 3), *lines[:21], *lines[22:-1]]


def test_groups_within_groups() -> None:
    keys = {name: (one << 48) + (two << 32) + 5 for name, (one, two) in {"a": (9, 1), "b": (9, 2), "c": (4, 2)}.items()}
    lines = [(length, keys[name]) for length, name in ((3, "a"), (7, "b"), (8, "a"), (9, "c"), (2, "b"), (10, "a"))]
    expected = [(10, "a"), (8, "a"), (3, "a"), (7, "b"), (2, "b"), (9, "c")]
    assert ordered("grouped", lines, 1) == [(length, keys[name]) for length, name in expected]


def test_a_large_job_has_each_prefix_once() -> None:
    assert num_changes(ordered("grouped", draw_lines(50_000, 500), 8)) == 499


def test_ties_keep_the_order_of_the_input() -> None:
    for order in ORDERS:
        same = np.full(50, 9)
        result = order_lines(order, same, np.full(50, 3, np.uint64), same, 4)
        assert result.tolist() == list(range(50))


def test_the_command_knows_all_of_them() -> None:
    # They are written there once more.
    for order in ORDERS:
        assert make_parser().parse_args(["batch", "m", "i", "o", "--order", order]).order == order
    with pytest.raises(SystemExit):
        make_parser().parse_args(["batch", "m", "i", "o", "--order", "random"])
