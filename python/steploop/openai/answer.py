"""What answers of both endpoints have in common."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from steploop.openai.errors import ApiError
from steploop.openai.protocol import GenerationRequest
from steploop.outputs import RequestOutput

_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def to_json(value: Any) -> str:
    """`value` in one line of ASCII."""
    return _encode_json(value)


def answer_head(answer_id: str, kind: str, model_name: str) -> dict[str, Any]:
    """The fields that every answer, and every part of a stream, begins with."""
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model_name}


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of an answer, as OpenAI's."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.metrics.num_generation_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def check_not_failed(output: RequestOutput, body: GenerationRequest) -> None:
    """Raises ApiError if a sample could not go on: its parameters let no token come, its grammar was too slow, or its
    logits were not numbers, which is no fault of the client's."""
    if all(completion.finish_reason != "error" for completion in output.outputs):
        return
    limits = (body.structured_outputs, body.response_format, body.allowed_token_ids, body.bad_words)
    if any(limits) or getattr(body, "tools", None):
        message = "the request's parameters leave no token to go on with, or its grammar takes too long"
        raise ApiError(400, message, code="generation_failed")
    raise ApiError(500, "the model failed on this request", code="generation_failed")
