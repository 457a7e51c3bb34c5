"""Errors as clients of OpenAI's API expect them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from steploop.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTooLongError, SteploopError

logger = logging.getLogger(__name__)

_PARAMETER = re.compile(r"(?:each of |the values of |the tokens of |the (?=prompt\b))?([a-z][a-z_]*)\b")
_FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_]+")
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: Of HTTP.
        param: The field of the request that is wrong.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode("utf-8", "backslashreplace").decode()  # it may quote half a surrogate pair
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException, fields: frozenset[str] = frozenset()) -> ApiError:
    """What a client is told of an exception; of one that it has no part in, nothing.

    Args:
        fields: Names of the request's fields: an error that begins with one is that field's.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, RequestTooLongError):
        prompt = "messages" if "messages" in fields else "prompt"
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        found = _PARAMETER.match(message)
        param = found.group(1) if found and found.group(1) in fields else None
        return ApiError(400, message, param=param, code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has ended", code="engine_dead")
    if not isinstance(error, SteploopError):
        logger.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed inside the server", code="internal_error")


def invalid_body(errors: Sequence[Any]) -> ApiError:
    """What a client is told of a body that is none of its endpoint's.

    Args:
        errors: pydantic's, with places within the body.
    """
    first = errors[0]
    # ("messages", 0, "role"); names of the types that a field may have are among them.
    place = [part for part in first["loc"] if isinstance(part, int) or _FIELD.fullmatch(part)]
    param = ".".join(map(str, place)) or None
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:64]
        return ApiError(400, f"{name} is not a parameter of this request", param=name, code="unknown_parameter")
    if param is None:
        return ApiError(400, f"the body must be an object of JSON: {first['msg']}", code="invalid_type")
    # One for each type that the field may have.
    reasons = dict.fromkeys(one["msg"] for one in errors if one["loc"][:1] == first["loc"][:1])
    return ApiError(400, f"{param}: {', or: '.join(reasons)}", param=param, code="invalid_type")
