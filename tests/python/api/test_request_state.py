"""RequestState: how what steps bring to the samples of a request becomes one RequestOutput."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from steploop import RequestOutput, SamplingParams
from steploop.request_options import RequestOptions
from steploop.request_state import RequestState


class Words:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        if 26 in token_ids:
            raise ValueError("no such letter")
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def state(**params: Any) -> RequestState:
    return RequestState("r", "ab", [0, 1], SamplingParams(**params), RequestOptions(), Words(), None)  # type: ignore[arg-type]


def news(index: int, *token_ids: int, reason: str | None = None, **values: Any) -> Any:
    """What a step brought to one sample."""
    return SimpleNamespace(
        **{
            "request_id": "r",
            "index": index,
            "token_ids": list(token_ids),
            "logprobs": [-0.5] * len(token_ids),
            "ranks": [None] * len(token_ids),
            "top_logprobs": [],
            "prompt_logprobs": None,
            "finished": reason is not None,
            "finish_reason": reason,
            "request_finished": False,
            "stop_token_id": None,
            "num_preemptions": 0,
            "num_cached_tokens": 0,
            "arrival_time": 1.0,
            "first_scheduled_time": math.nan,
            "first_token_time": math.nan,
            "last_token_time": math.nan,
        }
        | values
    )


def texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


def reasons(output: RequestOutput) -> list[str | None]:
    return [completion.finish_reason for completion in output.outputs]


def test_samples_grow_apart() -> None:
    request = state(n=3, logprobs=0)
    first = request.update([news(2, 7), news(0, 3)])  # in any order
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    assert texts(first) == ["d", "", "h"]
    second = request.update([news(1, 4), news(0, 5, reason="stop", stop_token_id=5)])
    assert texts(second) == ["df", "e", "h"]
    assert [completion.cumulative_logprob for completion in second.outputs] == [-1.0, -0.5, -0.5]
    assert [len(completion.logprobs or []) for completion in second.outputs] == [2, 1, 1]
    assert [completion.stop_reason for completion in second.outputs] == [5, None, None]
    assert (reasons(second), second.finished) == (["stop", None, None], False)
    third = request.update([news(1, reason="abort"), news(2, 8, reason="length")])
    assert (reasons(third), third.finished) == (["stop", "abort", "length"], True)
    assert texts(third) == ["df", "e", "hi"]
    assert texts(first) == ["d", "", "h"], "an earlier output must not change"
    assert first.outputs[2].token_ids == [7]


def test_a_stop_string_ends_its_sample() -> None:
    request = state(n=3, stop=["de", "xx"])
    first = request.update([news(0, 3), news(1, 3), news(2, 0)])
    assert texts(first) == ["", "", "a"], "d may be the beginning of de"
    assert request.stopped == []
    second = request.update([news(0, 4), news(1, 5), news(2, 3, reason="length")])
    assert texts(second) == ["", "df", "ad"]
    assert reasons(second) == ["stop", None, "length"]
    assert [completion.stop_reason for completion in second.outputs] == ["de", None, None]
    assert second.outputs[0].token_ids == [3, 4]
    assert request.stopped == [0]
    third = request.update([news(0, reason="abort"), news(1, 23, 23, reason="length")])
    assert (texts(third), reasons(third)) == (["", "df", "ad"], ["stop", "stop", "length"])
    assert (request.stopped, request.ended) == ([], True), "the engine ended it itself"


def test_stop_strings_wait_for_min_tokens() -> None:
    request = state(stop="a", min_tokens=2, max_tokens=9, include_stop_str_in_output=True)
    assert texts(request.update([news(0, 0)])) == ["a"]
    assert texts(request.update([news(0, 0)])) == ["aa"]
    last = request.update([news(0, 0)])
    assert (texts(last), last.outputs[0].stop_reason) == (["aaa"], "a")


def test_failure_after_a_stop_string() -> None:
    request = state(n=2, stop="b")
    request.update([news(0, 1)])
    assert request.stopped == [0]
    with pytest.raises(ValueError, match="no such letter"):
        request.update([news(1, 26)])
    assert (request.stopped, reasons(request.fail())) == ([], ["stop", "error"])


def test_metrics_are_of_all_samples() -> None:
    request = state(n=2)
    waiting = request.update([news(0, num_preemptions=1)]).metrics
    assert waiting.arrival_time == 1.0
    assert (waiting.first_scheduled_time, waiting.first_token_time, waiting.last_token_time) == (None, None, None)
    assert (waiting.num_preemptions, waiting.num_generation_tokens, waiting.time_per_output_token) == (1, 0, None)
    first = {"first_scheduled_time": 2.0, "first_token_time": 3.0}
    second = {"first_scheduled_time": 2.5, "first_token_time": 4.0}
    one_each = [news(0, 1, last_token_time=3.0, **first), news(1, 1, last_token_time=4.0, **second)]
    assert request.update(one_each).metrics.time_per_output_token is None
    request.update([news(0, 1, last_token_time=5.0, num_preemptions=1, **first)])
    metrics = request.update(
        [news(0, 1, last_token_time=6.0, num_preemptions=2, **first), news(1, 1, last_token_time=5.5, **second)]
    ).metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time) == (2.0, 3.0, 6.0)
    assert (metrics.num_preemptions, metrics.num_generation_tokens) == (2, 5)
    assert metrics.time_in_queue == 1.0
    assert metrics.time_to_first_token == 2.0
    assert metrics.time_per_output_token == pytest.approx((3.0 + 1.5) / (2 + 1))


def test_cached_tokens_are_the_first_samples() -> None:
    request = state(n=2)
    assert request.update([news(1, num_cached_tokens=30), news(0, num_cached_tokens=16)]).num_cached_tokens == 16
    assert request.update([news(1, num_cached_tokens=30)]).num_cached_tokens == 16


def test_failure_ends_what_is_unfinished() -> None:
    request = state(n=3)
    request.update([news(0, 1, reason="stop"), news(1, 2), news(2, 3)])
    with pytest.raises(ValueError, match="no such letter"):
        request.update([news(1, 26, reason="length")])
    assert not request.ended
    output = request.fail()
    assert request.ended
    assert (reasons(output), output.finished) == (["stop", "error", "error"], True)
