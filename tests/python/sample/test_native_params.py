"""The native SamplingParams: defaults, checks in its constructor, repr and equality."""

import math

import pytest

from steploop._C import SamplingParams
from steploop.errors import InvalidRequestError


def test_defaults():
    params = SamplingParams()
    assert params.n == 1
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (1.0, 0, 1.0, None)
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (16, 0, [])
    assert (params.ignore_eos, params.logprobs, params.prompt_logprobs) == (False, None, None)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ([], [], [])


def test_fields_read_back_as_given():
    values = {
        "n": 3,
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 0.1,
        "min_p": 0.2,
        "repetition_penalty": 1.3,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "logit_bias": [(3, 0.5), (0, -100.0)],
        "allowed_token_ids": [4, 2],
        "bad_words": [[1], [2, 3]],
        "seed": 2**64 - 1,
        "max_tokens": 5,
        "min_tokens": 5,
        "stop_token_ids": [3, 0],
        "ignore_eos": True,
        "logprobs": 20,
        "prompt_logprobs": 0,
    }
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values
    assert eval(repr(params)) == params
    assert params != SamplingParams(**values | {"logprobs": None})


def test_fields_cannot_be_written():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be >= 1, got 0"),
        ({"n": -2}, "n must be >= 1, got -2"),
        ({"temperature": -0.5}, "temperature must be finite and >= 0, got -0.5"),
        ({"temperature": math.nan}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": -math.nan}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": math.inf}, "temperature must be finite and >= 0, got inf"),
        ({"top_k": -2}, "top_k must be >= 1, or 0 or -1 for all tokens, got -2"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
        ({"min_p": -0.5}, r"min_p must be in \[0, 1\], got -0.5"),
        ({"min_p": math.nan}, r"min_p must be in \[0, 1\], got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and > 0, got 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be finite and > 0, got inf"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty must be in \[-2, 2\], got nan"),
        ({"logit_bias": [(-1, 0.0)]}, "the tokens of logit_bias must be >= 0, got -1"),
        ({"logit_bias": [(1, math.inf)]}, "the values of logit_bias must be finite, got inf"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be >= 0, got -1"),
        ({"bad_words": [[1], []]}, "each of bad_words must have a token or more, got none"),
        ({"bad_words": [[1, -2]]}, "the tokens of bad_words must be >= 0, got -2"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": -3}, "max_tokens must be >= 1, got -3"),
        ({"min_tokens": -1}, "min_tokens must be >= 0, got -1"),
        ({"min_tokens": 17}, r"min_tokens must be <= max_tokens \(16\), got 17"),
        ({"stop_token_ids": [1, -7]}, "stop_token_ids must be >= 0, got -7"),
        ({"logprobs": 21}, r"logprobs must be in 0..20, or None, got 21"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs must be in 0..20, or None, got 21"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs must be in 0..20, or None, got -1"),
        ({"logprobs": -1}, r"logprobs must be in 0..20, or None, got -1"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}$"):
        SamplingParams(**values)


@pytest.mark.parametrize("values", [{"heat": 1}, {"max_tokens": "8"}, {"top_k": 1.5}, {"seed": -1}, {"n": 2**31}])
def test_unknown_keywords_and_wrong_types_are_type_errors(values):
    with pytest.raises(TypeError):
        SamplingParams(**values)


def test_arguments_are_keyword_only():
    with pytest.raises(TypeError):
        SamplingParams(1.0)
