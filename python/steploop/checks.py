"""Checks of single values that users give: each says what must hold and what was given."""

from __future__ import annotations

import math
from numbers import Integral, Real
from pathlib import Path

from steploop.errors import InvalidArgumentError, SteploopError

INT32_MAX = 2**31 - 1

ErrorClass = type[SteploopError]


def checked_int(
    name: str, value: object, *, low: int, high: int = INT32_MAX, error: ErrorClass = InvalidArgumentError
) -> int:
    """`value` as an int within [low, high]."""
    # bool is an int to Python, but never what a caller means here; numpy's integers are welcome.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low:
        raise error(f"{name} must be >= {low}, got {number}")
    if number > high:
        raise error(f"{name} must be <= {high}, got {number}")
    return number


def as_finite(value: object) -> float | None:
    """`value` as a float; None for what is no number, or not a finite one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def check_positive(name: str, value: object) -> None:
    """A finite number > 0."""
    number = as_finite(value)
    if number is None or number <= 0:
        raise InvalidArgumentError(f"{name} must be a finite number > 0, got {value!r}")


def check_bool(name: str, value: object, *, error: ErrorClass = InvalidArgumentError) -> None:
    """True and False only."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def is_unicode(text: str) -> bool:
    """Whether `text` is free of halves of surrogate pairs, which no encoding can express."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_trace_path(trace: object) -> None:
    """Whether a trace can be written there; makes the file.

    Raises:
        InvalidArgumentError: it is no path, or cannot be opened.
    """
    if not isinstance(trace, (str, Path)) or not str(trace) or not is_unicode(str(trace)) or "\0" in str(trace):
        raise InvalidArgumentError(f"trace must be the path of a file, got {trace!r}")
    try:
        with open(trace, "ab"):  # the native engine writes it; this tells at once whether it can
            pass
    except OSError as error:
        raise InvalidArgumentError(f"trace file {trace} cannot be opened: {error.strerror}") from None
