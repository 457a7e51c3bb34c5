"""SamplingParams: what is accepted, what is refused and in which words, and where unset fields get their values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steploop import InvalidRequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 0.0), ("temperature", 2), ("temperature", np.float32(0.5)),
        ("top_p", 1), ("top_p", 1e-6), ("top_k", -1), ("top_k", 0), ("top_k", 10**9), ("top_k", np.int64(5)),
        ("seed", 0), ("seed", 2**64 - 1), ("max_tokens", 1), ("max_tokens", 10**9), ("min_tokens", 0),
        ("stop_token_ids", []), ("stop_token_ids", (3, np.int32(4))), ("ignore_eos", True), ("logprobs", 0),
        ("logprobs", 20), ("skip_special_tokens", False), ("detokenize", False), ("n", 1), ("n", np.int8(3)),
        ("min_p", 0), ("min_p", 1.0), ("repetition_penalty", 1e-9), ("repetition_penalty", 1000),
        ("presence_penalty", -2), ("presence_penalty", 2.0), ("frequency_penalty", 0), ("logit_bias", {}),
        ("logit_bias", {np.int64(3): np.float32(0.5), 4: -100}), ("allowed_token_ids", (3, 4)),
        ("bad_words", []), ("bad_words", ("a", " b")), ("stop", ["x", "\n\n"]), ("stop", ()),
        ("include_stop_str_in_output", True), ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", 1), ("truncate_prompt_tokens", -1),
        *((field, None) for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
                                      "max_tokens", "logprobs", "logit_bias", "allowed_token_ids",
                                      "truncate_prompt_tokens")),
    ],
)  # fmt: skip
def test_accepted(field: str, value: Any) -> None:
    expected = list(value) if isinstance(value, tuple) else value
    assert getattr(SamplingParams(**{field: value}), field) == expected


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "temperature must be >= 0, got -0.1"),
        ("temperature", math.nan, "temperature must be finite, got nan"),
        ("temperature", math.inf, "temperature must be finite, got inf"),
        ("temperature", 10**400, "temperature must be finite"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", True, "temperature must be a number, got True"),
        ("temperature", 1j, "temperature must be a number"),
        ("top_p", 0, r"top_p must be in \(0, 1\], got 0"),
        ("top_p", 1.01, r"top_p must be in \(0, 1\], got 1.01"),
        ("top_p", math.nan, "top_p must be finite"),
        ("top_k", -2, "top_k must be >= -1, got -2"),
        ("top_k", 1.0, "top_k must be an integer, got 1.0"),
        ("top_k", 2**31, "top_k must be <= 2147483647"),
        ("seed", -2, "seed must be >= 0"),
        ("min_p", -0.1, r"min_p must be in \[0, 1\], got -0.1"),
        ("min_p", 1.1, r"min_p must be in \[0, 1\], got 1.1"),
        ("min_p", math.nan, "min_p must be finite"),
        ("repetition_penalty", 0, "repetition_penalty must be > 0, got 0"),
        ("repetition_penalty", -1, "repetition_penalty must be > 0, got -1"),
        ("repetition_penalty", math.inf, "repetition_penalty must be finite"),
        ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ("presence_penalty", None, "presence_penalty must be a number, got None"),
        ("frequency_penalty", -2.1, r"frequency_penalty must be in \[-2, 2\], got -2.1"),
        ("frequency_penalty", "1", "frequency_penalty must be a number, got '1'"),
        ("logit_bias", [(1, 2.0)], "logit_bias must be a dict"),
        ("logit_bias", {1: math.nan}, "the values of logit_bias must be finite numbers, got nan"),
        ("logit_bias", {1: "2"}, "the values of logit_bias must be finite numbers, got '2'"),
        ("logit_bias", {"1": 2}, "the tokens of logit_bias must be an integer, got '1'"),
        ("logit_bias", {-1: 2}, "the tokens of logit_bias must be >= 0, got -1"),
        ("allowed_token_ids", [], "allowed_token_ids must have a token or more"),
        ("allowed_token_ids", 5, "allowed_token_ids must be a list"),
        ("allowed_token_ids", [0.5], "each of allowed_token_ids must be an integer"),
        ("bad_words", "word", "bad_words must be a list of strings, got 'word'"),
        ("bad_words", [1], "bad_words must be a list of strings"),
        ("bad_words", [""], "each of bad_words must be valid Unicode and not empty"),
        ("stop", "", "each of stop must be valid Unicode and not empty"),
        ("stop", ["a", ""], "each of stop must be valid Unicode and not empty"),
        ("stop", ["\ud800"], "each of stop must be valid Unicode"),
        ("stop", 3, "stop must be a list of strings, got 3"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be True or False"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be >= 1, got 0"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens must be >= 1, got -2"),
        ("seed", 2**64, "seed must be <= 18446744073709551615"),
        ("max_tokens", 0, "max_tokens must be >= 1, got 0"),
        ("max_tokens", -5, "max_tokens must be >= 1, got -5"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("max_tokens", 1.5, "max_tokens must be an integer"),
        ("min_tokens", -1, "min_tokens must be >= 0, got -1"),
        ("min_tokens", None, "min_tokens must be an integer, got None"),
        ("stop_token_ids", 3, "stop_token_ids must be a list"),
        ("stop_token_ids", "12", "stop_token_ids must be a list"),
        ("stop_token_ids", [1, "2"], "each of stop_token_ids must be an integer, got '2'"),
        ("stop_token_ids", [-1], "each of stop_token_ids must be >= 0, got -1"),
        ("stop_token_ids", [2**40], "each of stop_token_ids must be <="),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("logprobs", -1, "logprobs must be >= 0, got -1"),
        ("logprobs", 21, "logprobs must be <= 20, got 21"),
        ("prompt_logprobs", 21, "prompt_logprobs must be <= 20, got 21"),
        ("prompt_logprobs", True, "prompt_logprobs must be an integer"),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False"),
        ("detokenize", "yes", "detokenize must be True or False"),
        ("n", 0, "n must be >= 1, got 0"),
        ("n", True, "n must be an integer, got True"),
        ("n", None, "n must be an integer, got None"),
        ("n", 2.0, "n must be an integer, got 2.0"),
        ("n", 2**31, "n must be <= 2147483647"),
    ],
)
def test_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(
        InvalidRequestError, match="min_tokens must be <= max_tokens, got min_tokens 9 and max_tokens 8"
    ):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_stop_needs_text() -> None:
    with pytest.raises(InvalidRequestError, match="stop needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_equal_meanings_become_equal() -> None:
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == []
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logit_bias={1: 1000, 2: -1e9}).logit_bias == {1: 100.0, 2: -100.0}


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@given(st.dictionaries(st.sampled_from(list(SamplingParams.__dataclass_fields__)), anything))
def test_anything_else_is_one_kind_of_error(values: dict[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except InvalidRequestError:
        pass


def test_the_callers_list_is_copied() -> None:
    stop = [1]
    params = SamplingParams(stop_token_ids=stop)
    stop.append(2)
    assert params.stop_token_ids == [1]


@pytest.mark.parametrize(
    ("given_params", "model_defaults", "expected"),
    [
        ({}, {}, (1.0, 1.0, 0, 16)),
        ({}, {"min_p": 0.1, "repetition_penalty": 1.3}, (1.0, 1.0, 0, 16)),
        ({}, {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_tokens": 99}, (0.6, 0.9, 40, 99)),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0.6, "top_p": 0.9, "top_k": 40}, (0, 0.9, -1, 16)),
        ({"max_tokens": 3}, {"max_tokens": 99}, (1.0, 1.0, 0, 3)),
        ({"min_tokens": 50}, {}, (1.0, 1.0, 0, 50)),
    ],
)
def test_unset_fields(given_params: dict[str, Any], model_defaults: dict[str, Any], expected: tuple[Any, ...]) -> None:
    params = SamplingParams(**given_params).with_defaults(model_defaults)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == expected
    assert params.min_p == model_defaults.get("min_p", 0.0)
    assert params.repetition_penalty == model_defaults.get("repetition_penalty", 1.0)
