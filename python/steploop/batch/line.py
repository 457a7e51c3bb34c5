"""One line of a batch: how it is read and checked without the model, and what is derived from it: name and seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from steploop.openai.errors import ApiError, invalid_body
from steploop.openai.protocol import ChatCompletionRequest, CompletionRequest
from steploop.text import shorten

MAX_LINE_BYTES = 64 << 20
DIGEST_BYTES = 16

_MAX_QUOTED = 80
_BODIES: dict[str, type[ChatCompletionRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


@dataclass(frozen=True)
class BatchRequest:
    """What a line asks for."""

    custom_id: str
    body: ChatCompletionRequest | CompletionRequest


class BadLine(Exception):
    """A line that is no request.

    Args:
        custom_id: None where the line has none.
    """

    def __init__(self, error: ApiError, custom_id: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.custom_id = custom_id


def parse_line(raw: bytes) -> BatchRequest:
    """Reads a line.

    Raises:
        BadLine: it is not JSON, not a request, or one that the server would refuse.
    """
    fields = _parse_json(raw)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _bad("custom_id", f"must be a string that is not empty, got {_quoted(custom_id)}")
    try:
        return BatchRequest(custom_id, _parse_body(fields))
    except BadLine as error:
        error.custom_id = custom_id
        raise


def _parse_json(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine(ApiError(413, f"the line must have at most {MAX_LINE_BYTES} bytes", code="line_too_large"))
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadLine(ApiError(400, "the line must be UTF-8", code="invalid_json")) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise BadLine(ApiError(400, f"the line must be JSON: {reason}", code="invalid_json")) from None
    if not isinstance(fields, dict):
        raise BadLine(ApiError(400, f"the line must be an object of JSON, got {_quoted(fields)}", code="invalid_type"))
    return fields


def _parse_body(fields: dict[str, Any]) -> ChatCompletionRequest | CompletionRequest:
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    if method != "POST":
        raise _bad("method", f"must be POST, got {_quoted(method)}")
    if not isinstance(url, str) or url not in _BODIES:
        raise _bad("url", f"must be one of {', '.join(_BODIES)}, got {_quoted(url)}")
    if not isinstance(body, dict):
        raise _bad("body", f"must be an object, got {_quoted(body)}")
    try:
        request = _BODIES[url].model_validate(body)
    except ValidationError as error:
        raise BadLine(invalid_body(error.errors(include_url=False))) from None
    except RecursionError:
        raise _bad("body", "must not be nested so deeply") from None
    if request.stream:
        raise _bad("stream", "must be false: answers of a batch are not streamed")
    if request.deadline_ms is not None:
        raise _bad("deadline_ms", "must be left out: answers of a batch do not depend on how fast they come")
    return request


def _bad(name: str, what: str) -> BadLine:
    return BadLine(ApiError(400, f"{name} {what}", param=name, code="invalid_value"))


def _quoted(value: object) -> str:
    return "nothing" if value is None else shorten(repr(value), _MAX_QUOTED)


class JobKey:
    """Names lines. A name says what the line was and all settings that its answer depends on, so that answers of other
    lines and settings are not taken for those of this job.

    Args:
        seed: Of lines that have none.
        settings: Whatever else the answers depend on.
    """

    def __init__(self, seed: int, settings: dict[str, Any]) -> None:
        text = json.dumps({"seed": seed, **settings}, sort_keys=True, default=str)
        self._key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        self._seed = seed

    def digest(self, raw: bytes) -> bytes:
        """A line's name, of DIGEST_BYTES."""
        return hashlib.blake2b(raw, digest_size=DIGEST_BYTES, key=self._key).digest()

    def seed(self, custom_id: str, number: int) -> int:
        """That of a line's prompt, where it has none of its own: neither its place in the file nor what ran before it
        change what is drawn."""
        text = f"{self._seed}/{number}/{custom_id}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def digest_of_id(custom_id: str) -> bytes:
    """To find equal ones with."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
