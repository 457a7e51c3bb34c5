"""Workloads in columns: what they must hold, what their prompts share, and how much of them is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steploop.errors import InvalidArgumentError
from steploop.workload import PromptMaker, Segments, Workload, WorkloadRequest
from steploop.workload.sharing import share_of_known_tokens


def make_workload(prompts: list[list[tuple[int, int]]], outputs: list[int]) -> Workload:
    """Of the (content, length) pairs of each prompt."""
    parts = [part for prompt in prompts for part in prompt]
    segments = Segments(
        np.cumsum([0, *(len(prompt) for prompt in prompts)]),
        np.array([content for content, _ in parts]),
        np.array([length for _, length in parts]),
    )
    return Workload(
        seed=0,
        arrival_times=np.arange(len(prompts)),
        num_prompt_tokens=np.array([sum(length for _, length in prompt) for prompt in prompts]),
        num_output_tokens=np.array(outputs),
        segments=segments,
    )


def plain(**fields: Any) -> Workload:
    given = {"seed": 0, "arrival_times": [0.0, 1.0], "num_prompt_tokens": [3, 4], "num_output_tokens": [5, 6]}
    return Workload(**(given | fields))


CHAT = make_workload([[(0, 10), (1, 4)], [(0, 10), (2, 5)], [(0, 10), (1, 9)]], [3, 1, 7])


def test_columns() -> None:
    workload = plain(tenants=[1, 0], priorities=[0, 2])
    assert [
        getattr(workload, name).dtype.name for name in ("arrival_times", "num_prompt_tokens", "num_output_tokens")
    ] == [
        "float64",
        "int32",
        "int32",
    ]
    assert len(workload) == 2
    assert workload.requests == [WorkloadRequest(0.0, 3, 5, 1, 0), WorkloadRequest(1.0, 4, 6, 0, 2)]
    assert plain().requests[1] == WorkloadRequest(1.0, 4, 6)
    with pytest.raises(ValueError, match="read-only"):
        workload.num_prompt_tokens[0] = 7


def test_equality_is_of_all_columns() -> None:
    assert plain() == plain()
    assert plain() != 1
    for fields in ({"seed": 1}, {"num_prompt_tokens": [3, 5]}, {"tenants": [0, 0]}):
        assert plain() != plain(**fields)
    assert CHAT == dataclasses.replace(CHAT)
    assert CHAT != dataclasses.replace(CHAT, segments=None)


def test_prompts_that_share_nothing_are_contents_of_their_own() -> None:
    workload = plain()
    assert (workload.prompt_segments(1), workload.num_contents) == ([(1, 4)], 2)
    assert (workload.output_contents.tolist(), workload.output_starts.tolist()) == ([0, 1], [3, 4])


def test_answers_continue_the_last_segment() -> None:
    assert CHAT.prompt_segments(2) == [(0, 10), (1, 9)]
    assert (CHAT.output_contents.tolist(), CHAT.output_starts.tolist(), CHAT.num_contents) == ([1, 2, 1], [4, 5, 9], 3)
    maker = PromptMaker(seed=3, vocab_size=500)
    first, second = (maker.token_ids_of(CHAT.prompt_segments(index)) for index in (0, 2))
    assert len(first) == 14
    assert second[:14] == first
    answer = maker.token_ids(1, 4 + 3)[4:]
    assert second[14:17] == answer
    words = [maker.text_of(CHAT.prompt_segments(index)).split() for index in (0, 2)]
    assert words[1][:14] == words[0]
    assert [len(prompt) for prompt in words] == [14, 19]


def test_share_of_known_tokens() -> None:
    # 10 and 10 of the system prompt; of the third also the first's 4 and its answer of 3.
    assert share_of_known_tokens(CHAT) == pytest.approx((10 + 10 + 4 + 3) / (14 + 15 + 19))
    assert CHAT.summary()["known_prompt_tokens"] == {"share": share_of_known_tokens(CHAT)}
    assert share_of_known_tokens(plain()) == 0
    # Tenants share nothing.
    apart = dataclasses.replace(CHAT, tenants=np.arange(len(CHAT), dtype=np.int32))
    assert share_of_known_tokens(apart) == 0
    together = dataclasses.replace(CHAT, tenants=np.full(len(CHAT), 7, np.int32))
    assert share_of_known_tokens(together) == share_of_known_tokens(CHAT)
    assert "known_prompt_tokens" not in plain().summary()


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=3, unique_by=lambda s: s[0]),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_share_of_known_tokens_is_what_counting_says(drawn: list[tuple[list[tuple[int, int]], int]]) -> None:
    workload = make_workload([prompt for prompt, _ in drawn], [output for _, output in drawn])
    known: dict[int, int] = {}
    num_known = 0
    for prompt, output in drawn:
        num_known += sum(min(length, known.get(content, 0)) for content, length in prompt)
        reach = [*prompt[:-1], (prompt[-1][0], prompt[-1][1] + output)]
        known |= {content: max(length, known.get(content, 0)) for content, length in reach}
    assert share_of_known_tokens(workload) == pytest.approx(num_known / workload.num_prompt_tokens.sum())


def test_fingerprint_is_of_all_that_a_simulation_would_see() -> None:
    changed = [
        plain(),
        plain(tenants=[0, 1]),
        plain(priorities=[0, 1]),
        CHAT,
        dataclasses.replace(CHAT, segments=None),
        make_workload([[(0, 10), (1, 4)], [(0, 10), (2, 5)], [(0, 10), (3, 9)]], [3, 1, 7]),
    ]
    assert len({workload.summary()["fingerprint"] for workload in changed}) == len(changed)
    assert plain(seed=9, num_skipped=3).summary()["fingerprint"] == plain().summary()["fingerprint"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_prompt_tokens": [3]}, "must have num_prompt_tokens for each of its 2 arrival_times, got 1"),
        ({"tenants": [0, 1, 2]}, "must have tenants for each of its 2 arrival_times, got 3"),
        ({"num_output_tokens": [5, 0]}, "num_output_tokens must be >= 1, got 0"),
        ({"num_prompt_tokens": [-1, 3]}, "num_prompt_tokens must be in 0..2147483647, got -1 to 3"),
        ({"num_prompt_tokens": [1, 2**31]}, "num_prompt_tokens must be in 0..2147483647, got 1 to 2147483648"),
        ({"num_prompt_tokens": [1.5, 3]}, "num_prompt_tokens must be a list of integers"),
        (
            {"arrival_times": [], "num_prompt_tokens": [], "num_output_tokens": []},
            "a workload must have at least one request, got none",
        ),
        ({"arrival_times": [[0.0, 1.0]]}, "arrival_times must be a list of numbers"),
        ({"arrival_times": [1.0, 0.5]}, "arrival_times must be finite, >= 0, none before the one before it"),
        ({"arrival_times": [0.0, float("nan")]}, "arrival_times must be finite"),
        ({"arrival_times": [-1.0, 0.0]}, "arrival_times must be finite, >= 0"),
        ({"segments": Segments([0, 1, 2], [0, 1], [3, 5])}, "must add up to its num_prompt_tokens"),  # type: ignore
        ({"segments": Segments([0, 1], [0], [3])}, "must have segments for each of its 2"),  # type: ignore
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plain(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([1, 2], [0], [1]), "offsets from 0 to their number"),
        (([0, 1], [0, 1], [1, 1]), "offsets from 0 to their number"),
        (([0], [], []), "offsets from 0 to their number"),
        (([0, 0, 1], [0], [1]), "each above the one before"),
        (([0, 1], [0], [1, 2]), "as many contents as lengths, got 1 and 2"),
        (([0, 1], [-1], [1]), "contents >= 0 and lengths >= 1"),
        (([0, 1], [0], [0]), "contents >= 0 and lengths >= 1"),
    ],
)
def test_segments_refused(columns: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Segments(*columns)
    assert words in str(caught.value)
