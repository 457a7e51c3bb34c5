"""RequestOptions: what a request tells the scheduler beside its prompt and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from steploop.checks import as_finite, checked_int, is_unicode
from steploop.errors import InvalidRequestError

_MAX_SECONDS = 1e12  # more would overflow the engine's microseconds; no clock gets there


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """See `LLMEngine.add_request`. Checked when made.

    Raises:
        InvalidRequestError: a value of the wrong type or range.
    """

    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        priority = checked_int("priority", self.priority, low=-(2**31), error=InvalidRequestError)
        object.__setattr__(self, "priority", priority)
        for name in ("tenant", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
                raise InvalidRequestError(f"{name} must be a string of valid Unicode, not empty, got {value!r}")
        if self.deadline_ms is not None:
            milliseconds = as_finite(self.deadline_ms)
            if milliseconds is None or not 0 < milliseconds < _MAX_SECONDS * 1000:
                raise InvalidRequestError(
                    f"deadline_ms must be milliseconds after arrival, > 0 and finite, got {self.deadline_ms!r}"
                )
            object.__setattr__(self, "deadline_ms", milliseconds)


def check_request_id(request_id: object) -> None:
    """Any string that can be encoded.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(request_id, str) or not is_unicode(request_id):
        raise InvalidRequestError(f"request_id must be a string of valid Unicode, got {request_id!r}")


def checked_time(arrival_time: object) -> float:
    """Seconds on the clock of `time.monotonic()`.

    Raises:
        InvalidRequestError: they are none.
    """
    seconds = as_finite(arrival_time)
    if seconds is None or not 0 <= seconds < _MAX_SECONDS:
        raise InvalidRequestError(
            f"arrival_time must be seconds on the clock of time.monotonic(), >= 0, got {arrival_time!r}"
        )
    return seconds
