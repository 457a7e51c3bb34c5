"""A request's latencies, from hand-made arrivals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steploop.loadtest.record import Arrival, RequestRecord
from steploop.loadtest.slo import meets, parse_slo


def record(arrivals: list[tuple[float, int]], **fields: Any) -> RequestRecord:
    fields = {"sent_time": 10.5, "end_time": 20.0, **fields}
    return RequestRecord(0, 10.0, 5, 8, arrivals=[Arrival(*arrival) for arrival in arrivals], **fields)


def test_one_token_a_chunk() -> None:
    one = record([(11.0, 1), (11.5, 1), (13.5, 1)], num_output_tokens=3)
    assert (one.ttft, one.tpot, one.longest_gap, one.e2e) == (1.0, 1.25, 2.0, 10.0)
    assert one.gaps() == [(11.5, 0.5, 1), (13.5, 2.0, 1)]


def test_several_tokens_a_chunk() -> None:
    """Nine tokens in three chunks: three each, of which the first three came together."""
    one = record([(11.0, 1), (12.5, 1), (14.0, 1)], num_output_tokens=9)
    assert one.token_arrivals() == [(11.0, 3), (12.5, 3), (14.0, 3)]
    assert one.gaps() == [(12.5, 1.5, 3), (14.0, 1.5, 3)]
    assert (one.tpot, one.longest_gap) == (0.5, 1.5)


def test_chunks_received_at_once_are_one_arrival() -> None:
    one = record([(11.0, 1), (12.0, 3)], num_output_tokens=8)
    assert one.token_arrivals() == [(11.0, 2), (12.0, 6)]


def test_more_chunks_than_tokens() -> None:
    one = record([(11.0, 1), (12.0, 1), (13.0, 1), (14.0, 1)], num_output_tokens=2)
    assert one.token_arrivals() == [(11.0, 1), (13.0, 1)]


def test_without_usage_chunks_are_counted() -> None:
    one = record([(11.0, 1), (12.0, 2)])
    assert one.num_output_tokens is None
    assert one.num_output_tokens_known == 3
    assert one.token_arrivals() == [(11.0, 1), (12.0, 2)]


def test_answers_without_gaps() -> None:
    for one in (record([]), record([(11.0, 1)], num_output_tokens=5), record([], num_output_tokens=5)):
        assert (one.tpot, one.longest_gap, one.gaps()) == (None, None, [])
        assert one.e2e == 10.0
    assert record([]).ttft is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(1, 200))
def test_no_token_is_lost(amounts: list[int], num_tokens: int) -> None:
    one = record([(float(index), amount) for index, amount in enumerate(amounts)], num_output_tokens=num_tokens)
    spread = one.token_arrivals()
    assert sum(arrival.amount for arrival in spread) == num_tokens
    assert spread[0].time == 0 and all(arrival.amount > 0 for arrival in spread)
    # As evenly as whole tokens allow.
    share = num_tokens / sum(amounts)
    chunks = dict(enumerate(amounts))
    assert all(abs(arrival.amount - share * chunks[int(arrival.time)]) <= 1 + share for arrival in spread) or share < 1


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "completed"),
        ({"error": "timeout"}, "failed"),
        ({"end_time": None}, "unfinished"),
        ({"end_time": None, "sent_time": None}, "not_sent"),
    ],
)
def test_state(fields: dict[str, Any], state: str) -> None:
    assert record([], **fields).state == state


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft=1", True),
        ("ttft=0.9", False),
        ("tpot=1.25", True),
        ("tpot=1.2", False),
        ("itl=2", True),
        ("itl=1.9", False),
        ("e2e=10", True),
        ("e2e=9.9", False),
        ("ttft=1, tpot=2 ,itl=2,e2e=9", False),
    ],
)
def test_slo(slo: str, met: bool) -> None:
    one = record([(11.0, 1), (11.5, 1), (13.5, 1)], num_output_tokens=3)
    assert meets(one, parse_slo(slo)) == met
    one.error = "timeout"
    assert not meets(one, parse_slo(slo))


def test_slo_of_answers_without_figures() -> None:
    assert not meets(record([]), parse_slo("ttft=100"))
    assert meets(record([(11.0, 1)]), parse_slo("ttft=100,itl=0.1,tpot=0.1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "tfft=1",
            "must be one of ttft=SECONDS, tpot=SECONDS, itl=SECONDS, e2e=SECONDS, got 'tfft'; did you mean ttft",
        ),
        ("", "an SLO must be one of"),
        ("ttft", "must have the form ttft=SECONDS, got 'ttft'"),
        ("ttft=x", "must have the form ttft=SECONDS, got 'ttft=x'"),
        ("ttft=nan", "the SLO of ttft must be a finite number > 0, got nan"),
        ("e2e=-1", "the SLO of e2e must be a finite number > 0, got -1"),
        ("e2e=1,e2e=2", "one limit for e2e, got two"),
    ],
)
def test_bad_slo(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_slo(text)
    assert words in str(caught.value)
