"""Conversations: turns that repeat what was said, system prompts that are shared, and who sends them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import (
    Conversations,
    Fixed,
    Ranks,
    ThinkTime,
    Workload,
    draw_workload,
    parse_arrivals,
    parse_lengths,
)
from steploop.workload.specs import parse_ranks, parse_shared_prefix, parse_think_time


def draw(
    count: int = 2000, *, arrivals: str = "poisson:2", turns: str = "uniform:1:7", seed: int = 4, **fields: Any
) -> Workload:
    labels = {name: fields.pop(name) for name in ("tenants", "priorities") if name in fields}
    return draw_workload(
        count,
        lengths=(parse_lengths("uniform:5:50"), parse_lengths("exponential:20:80:clip")),
        arrivals=parse_arrivals(arrivals),
        seed=seed,
        conversations=Conversations(turns=parse_lengths(turns), **fields),
        **labels,
    )


def turns_of(workload: Workload) -> list[list[int]]:
    """The requests of each conversation, in their order."""
    assert workload.conversations is not None
    order = np.argsort(workload.conversations, kind="stable")
    return [part.tolist() for part in np.split(order, np.flatnonzero(np.diff(workload.conversations[order])) + 1)]


def test_turns_repeat_what_was_said() -> None:
    workload = draw(num_system_tokens=100, groups=Ranks(3))
    assert len(workload) == 2000
    for turns in turns_of(workload):
        (system, conversation) = workload.prompt_segments(turns[0])
        assert system[1] == 100
        said = 0
        for index in turns:
            assert workload.prompt_segments(index) == [
                system,
                (conversation[0], workload.num_prompt_tokens[index] - 100),
            ]
            own_part = workload.num_prompt_tokens[index] - 100 - said
            assert 5 <= own_part <= 50
            said += own_part + workload.num_output_tokens[index]
    contents = [workload.prompt_segments(turns[0])[1][0] for turns in turns_of(workload)]
    assert len(set(contents)) == len(contents)
    assert min(contents) == 3  # after the system prompts of the three groups


def test_all_conversations_are_whole_but_the_last() -> None:
    sizes = [len(turns) for turns in turns_of(draw())]
    drawn = parse_lengths("uniform:1:7").draw(np.random.default_rng([4, 4]), len(sizes)).tolist()  # Stream.TURNS
    assert sizes[:-1] == drawn[:-1]
    assert 1 <= sizes[-1] <= drawn[-1]
    assert np.mean(sizes) == pytest.approx(4, rel=0.1)


def test_times() -> None:
    workload = draw(4000, think_time=ThinkTime(3.0))
    assert workload.arrival_times[0] == 0
    turns = turns_of(workload)
    gaps = np.concatenate([np.diff(workload.arrival_times[part]) for part in turns])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(3, rel=0.06)
    assert gaps.std() == pytest.approx(3, rel=0.1)
    begins = np.array([workload.arrival_times[part[0]] for part in turns])
    assert (np.diff(begins) >= 0).all()
    assert (len(begins) - 1) / begins[-1] == pytest.approx(2)
    fixed = draw(50, think_time=ThinkTime(3.0, "fixed"), arrivals="burst", turns="fixed:5")
    assert fixed.arrival_times.tolist() == pytest.approx(sorted([0.0, 3.0, 6.0, 9.0, 12.0] * 10))


def test_requests_of_one_moment_stay_in_order() -> None:
    workload = draw(turns="fixed:2", arrivals="burst", think_time=ThinkTime(3.0, "fixed"))
    assert workload.conversations is not None
    assert workload.conversations.tolist() == [*range(1000), *range(1000)]


def test_another_rate_or_think_time_leaves_the_turns_alone() -> None:
    def content(workload: Workload) -> list[Any]:
        return [
            [(workload.num_prompt_tokens[index], workload.num_output_tokens[index]) for index in turns]
            for turns in turns_of(workload)
        ]

    before = content(draw())
    assert content(draw(arrivals="gamma:50:0.5", think_time=ThinkTime(0.1, "fixed"))) == before
    assert content(draw(seed=5)) != before
    # Nor does a system prompt change what is drawn, nor the number of requests.
    longer = content(draw(num_system_tokens=7))
    assert [[(p - 7, o) for p, o in turns] for turns in longer] == before
    assert content(draw(5000))[: len(before) - 1] == before[:-1]


def test_no_turn_past_the_most_tokens() -> None:
    free, limited = draw(turns="fixed:6"), draw(turns="fixed:6", max_tokens=180, num_system_tokens=30)
    assert (limited.num_prompt_tokens + limited.num_output_tokens).max() <= 180
    assert len(limited) == 2000
    # What the same turns would have come to: a conversation ends before the first that is too long.
    free_turns = turns_of(free)
    for turns, whole in zip(turns_of(limited)[:-1], free_turns, strict=False):
        sums = [int(free.num_prompt_tokens[i] + free.num_output_tokens[i]) + 30 for i in whole]
        if len(whole) == 6:
            assert len(turns) == sum(total <= 180 for total in sums)
    assert {1, 2, 3} < {len(turns) for turns in turns_of(limited)}


def test_groups_evenly_and_by_zipfs_law() -> None:
    for exponent in (0.0, 1.0):
        workload = draw(8000, turns="fixed:1", num_system_tokens=10, groups=Ranks(4, exponent))
        assert workload.conversations is None  # none goes on
        assert workload.segments is not None
        counts = np.bincount(workload.segments.contents[::2], minlength=4)
        expected = np.arange(1, 5) ** -exponent
        expected *= 8000 / expected.sum()
        assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.1% of chi-square of 3


def test_tenants_and_priorities_are_a_conversations() -> None:
    workload = draw(tenants=Ranks(5, 1.0), priorities=Ranks(3))
    assert workload.tenants is not None and workload.priorities is not None
    for turns in turns_of(workload):
        assert len(set(workload.tenants[turns].tolist())) == len(set(workload.priorities[turns].tolist())) == 1
    summary = workload.summary()
    assert summary["conversations"]["count"] == len(turns_of(workload))
    assert summary["conversations"]["mean_turns"] == pytest.approx(2000 / summary["conversations"]["count"])
    assert summary["tenants"]["count"] == 5
    assert summary["tenants"]["largest_share"] == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5), abs=0.08)
    # Neither changes what else is drawn.
    without = draw()
    assert workload.arrival_times.tolist() == without.arrival_times.tolist()
    assert workload.num_prompt_tokens.tolist() == without.num_prompt_tokens.tolist()


def test_tenants_of_requests_without_conversations() -> None:
    lengths = (Fixed(3), Fixed(4))
    workload = draw_workload(9000, lengths=lengths, arrivals=parse_arrivals("burst"), priorities=Ranks(3))
    assert workload.tenants is None and workload.priorities is not None
    counts = np.bincount(workload.priorities)
    assert ((counts - 3000) ** 2 / 3000).sum() < 13.8  # 0.1% of chi-square of 2


def test_ranks() -> None:
    ranks = Ranks(1000, 1.2)
    drawn = ranks.draw(np.random.default_rng(0), 200_000)
    assert (drawn.min(), drawn.max() < 1000) == (0, True)
    assert drawn.mean() + 1 == pytest.approx(ranks.mean, rel=0.02)
    assert ranks.draw(np.random.default_rng(0), 10).tolist() == drawn[:10].tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: draw(max_tokens=20),
            "the first turn of a conversation and its answer must have at most 20 tokens, got",
        ),
        (lambda: draw(max_tokens=0), "the most tokens of a conversation must be >= 1, got 0"),
        (lambda: draw(num_system_tokens=-1), "the tokens of the system prompt must be >= 0, got -1"),
        (lambda: ThinkTime(math.nan), "the think time must be a finite number > 0, got nan"),
        (lambda: ThinkTime(1.0, "uniform"), "the think time must be one of exponential, fixed, got 'uniform'"),
        (lambda: parse_think_time("exponental:3"), "did you mean exponential:SECONDS?"),
        (lambda: parse_think_time("fixed"), "'fixed' must have the form fixed:SECONDS"),
        (lambda: parse_think_time("fixed:-1"), "the think time must be a finite number > 0, got -1.0"),
        (lambda: parse_ranks("tenants", "0"), "tenants must be >= 1, got 0"),
        (lambda: parse_ranks("tenants", "x"), "tenants must be an integer, got 'x'"),
        (lambda: parse_ranks("tenants", "3:-1"), "the exponent of Zipf's law must be a finite number >= 0, got -1.0"),
        (lambda: parse_ranks("tenants", "3:1:1"), "'3:1:1' must have the form N[:EXPONENT]"),
        (lambda: parse_shared_prefix("0"), "the tokens of a shared prefix must be >= 1, got 0"),
        (lambda: parse_shared_prefix("9:0"), "the groups of a shared prefix must be >= 1, got 0"),
        (lambda: parse_shared_prefix("9:"), "the groups of a shared prefix must be an integer, got ''"),
        (lambda: parse_shared_prefix("9:1:1:1"), "must have the form TOKENS[:GROUPS[:EXPONENT]]"),
        (lambda: Ranks(2, math.inf), "the exponent of Zipf's law must be a finite number >= 0, got inf"),
    ],
)
def test_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_far_too_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(draw(3000, turns="fixed:1000000000", max_tokens=5000)) == 3000
    monkeypatch.setattr("steploop.workload.conversations._MAX_TURNS", 4000)
    with pytest.raises(InvalidArgumentError, match="conversations must have fewer turns"):
        draw(3000, turns="fixed:1000000000", max_tokens=5000)


def test_specs() -> None:
    assert parse_shared_prefix("500") == (500, Ranks(1))
    assert parse_shared_prefix("500:4:1.5") == (500, Ranks(4, 1.5))
    assert parse_think_time("fixed:2") == ThinkTime(2.0, "fixed")
    assert parse_ranks("tenants", "7") == Ranks(7, 0.0)
