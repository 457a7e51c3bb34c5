"""From a request's body to SamplingParams and the scheduler's options."""

from __future__ import annotations

from typing import Any

from steploop.errors import InvalidRequestError
from steploop.openai.protocol import GenerationRequest, ResponseFormat
from steploop.sampling_params import SamplingParams
from steploop.structured_outputs import StructuredOutputsParams

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all together: they are looked for after each token."""
MAX_BAD_WORDS = 1024

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "allowed_token_ids",
    "seed",
    "stop",
    "truncate_prompt_tokens",
)
_OR_DEFAULT: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words": [],
    "min_tokens": 0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""Fields that may be null, and what that means."""


def sampling_params(
    body: GenerationRequest, *, structured_outputs: StructuredOutputsParams | None = None, **others: Any
) -> SamplingParams:
    """`body`'s, and `others`.

    Args:
        structured_outputs: In the place of those that `body` asks for.

    Raises:
        InvalidRequestError: a value out of its range, or more of something than the server takes.
    """
    for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
        value = getattr(body, name)
        if isinstance(value, list) and len(value) > most:
            raise InvalidRequestError(f"{name} must have at most {most} entries, got {len(value)}")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if (size := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOP_CHARACTERS} characters in all, got {size}")
    params = {name: getattr(body, name) for name in _SAME}
    for name, default in _OR_DEFAULT.items():
        value = getattr(body, name)
        params[name] = default if value is None else value
    return SamplingParams(
        logit_bias=None if body.logit_bias is None else _token_keys(body.logit_bias),
        structured_outputs=structured_outputs or _form(body),
        **params,
        **others,
    )


def request_options(body: GenerationRequest) -> dict[str, Any]:
    """What `AsyncLLMEngine.add_request` takes besides."""
    return {name: getattr(body, name) for name in ("priority", "tenant", "cache_salt", "deadline_ms")}


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequestError(f"logit_bias must have token ids as keys, got {list(bias)[:8]}") from None


def _form(body: GenerationRequest) -> StructuredOutputsParams | None:
    from_format = None if body.response_format is None else _form_of_format(body.response_format)
    if body.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise InvalidRequestError("structured_outputs must not come with a response_format")
    given = body.structured_outputs
    return StructuredOutputsParams(
        json=given.json_,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=given.json_object,
        disable_any_whitespace=given.disable_any_whitespace,
    )


def _form_of_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise InvalidRequestError("response_format of type json_schema must have a json_schema with a schema")
    return StructuredOutputsParams(json=form.json_schema.schema_)
