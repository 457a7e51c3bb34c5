"""Whole workloads: the same for a seed, each stream for itself, their prompts and their summary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import (
    PromptMaker,
    RecordedArrivals,
    RecordedLengths,
    Workload,
    draw_workload,
    parse_arrivals,
    parse_lengths,
)
from steploop.workload.prompts import WORDS
from steploop.workload.summary import describe_lengths


def draw(
    prompts: str = "uniform:10:99",
    outputs: str = "exponential:50",
    arrivals: str = "poisson:2",
    *,
    count: int = 50,
    seed: int = 0,
) -> Workload:
    lengths = (parse_lengths(prompts), parse_lengths(outputs))
    return draw_workload(count, lengths=lengths, arrivals=parse_arrivals(arrivals), seed=seed)


def column(workload: Workload, name: str) -> list[Any]:
    return [getattr(request, name) for request in workload.requests]


def test_same_seed_same_workload() -> None:
    assert draw(seed=5) == draw(seed=5)
    assert draw(seed=5).requests != draw(seed=6).requests
    for name in ("num_prompt_tokens", "num_output_tokens"):
        assert column(draw(count=20), name) == column(draw(count=50), name)[:20]


@pytest.mark.parametrize(
    ("changed", "column_name"),
    [
        ({"prompts": "lognormal:9:1"}, "num_prompt_tokens"),
        ({"outputs": "uniform:1:5"}, "num_output_tokens"),
        ({"arrivals": "gamma:9:0.5"}, "arrival_time"),
    ],
)
def test_streams_are_independent(changed: dict[str, str], column_name: str) -> None:
    """What one is drawn from changes no other."""
    before, after = draw(), draw(**changed)  # type: ignore[arg-type]
    for name in ("num_prompt_tokens", "num_output_tokens", "arrival_time"):
        assert (column(before, name) == column(after, name)) == (name != column_name)


def test_streams_are_not_correlated() -> None:
    workload = draw("exponential:500", "exponential:500", count=5000)
    table = np.array([column(workload, "num_prompt_tokens"), column(workload, "num_output_tokens")], dtype=float)
    assert abs(np.corrcoef(table)[0, 1]) < 0.05


def test_recorded_pairs_stay_pairs() -> None:
    lengths = (RecordedLengths([1, 2, 3], "a"), RecordedLengths([10, 20, 30], "a"))
    workload = draw_workload(3, lengths=lengths, arrivals=RecordedArrivals([5.0, 6.0, 6.0], "t"))
    assert [(r.arrival_time, r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests] == [
        (0.0, 1, 10),
        (1.0, 2, 20),
        (1.0, 3, 30),
    ]


def test_summary() -> None:
    workload = draw("fixed:10", "uniform:1:100", "poisson:4", count=2000)
    summary = workload.summary()
    outputs = column(workload, "num_output_tokens")
    assert summary["prompt_tokens"] == {
        "count": 2000,
        "total": 20000,
        "mean": 10,
        "p50": 10,
        "p90": 10,
        "p99": 10,
        "max": 10,
    }
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert summary["output_tokens"][name] == np.percentile(outputs, share)
    assert summary["output_tokens"]["max"] == max(outputs)
    assert summary["arrivals"]["rate"] == pytest.approx(4)
    assert summary["arrivals"]["coefficient_of_variation"] == pytest.approx(1, rel=0.1)
    assert summary["arrivals"]["duration"] == workload.requests[-1].arrival_time
    assert summary["fingerprint"] == draw("fixed:10", "uniform:1:100", "poisson:4", count=2000).summary()["fingerprint"]
    assert summary["fingerprint"] != draw("fixed:11", "uniform:1:100", "poisson:4", count=2000).summary()["fingerprint"]


def test_summary_of_few() -> None:
    assert draw(arrivals="burst").summary()["arrivals"] == {
        "duration": 0,
        "rate": None,
        "coefficient_of_variation": None,
    }
    assert draw(count=1).summary()["arrivals"]["rate"] is None
    assert draw(count=2).summary()["arrivals"]["coefficient_of_variation"] is None
    assert describe_lengths([]) == {"count": 0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"count": 0}, "num_requests must be >= 1, got 0"),
        ({"count": 1.5}, "num_requests must be an integer"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"seed": "x"}, "seed must be an integer"),
    ],
)
def test_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        draw(**changed)


def test_prompts_of_token_ids() -> None:
    maker = PromptMaker(seed=3, vocab_size=300)
    prompt = maker.token_ids(7, 5000)
    assert len(prompt) == 5000
    assert (min(prompt), max(prompt)) == (0, 299)
    assert np.mean(prompt) == pytest.approx(149.5, rel=0.05)
    # By seed, run and number alone: neither its length nor other prompts change how one begins.
    assert maker.token_ids(7, 5) == prompt[:5]
    others = [
        PromptMaker(seed=4, vocab_size=300).token_ids(7, 20),
        PromptMaker(seed=3, run=1, vocab_size=300).token_ids(7, 20),
        maker.token_ids(8, 20),
    ]
    assert prompt[:20] not in others


def test_prompts_of_text() -> None:
    text = PromptMaker(seed=3).text(0, 40)
    assert len(text.split()) == 40
    assert set(text.split()) <= set(WORDS)
    assert text == PromptMaker(seed=3).text(0, 40) != PromptMaker(seed=3).text(1, 40)
    assert len(set(WORDS)) == len(WORDS)


def test_token_ids_need_a_vocabulary() -> None:
    with pytest.raises(InvalidArgumentError, match="need the vocabulary's size"):
        PromptMaker(seed=0).token_ids(0, 1)
    with pytest.raises(InvalidArgumentError, match="the vocabulary's size must be >= 1, got 0"):
        PromptMaker(seed=0, vocab_size=0).token_ids(0, 1)
