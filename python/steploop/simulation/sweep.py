"""Sweeps: one option of a command, with several values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steploop.errors import InvalidArgumentError
from steploop.workload.specs import unknown_name

RATE = "rate"
_MOST_VALUES = 1000


@dataclass(frozen=True)
class Sweep:
    """Values of an option, by the option's name with underscores; or of the rate of arrivals."""

    name: str
    values: tuple[Any, ...]


def parse_sweep(text: str, options: Mapping[str, tuple[Callable[[str], Any], Sequence[Any] | None]]) -> Sweep:
    """From NAME=A,B,C or NAME=LOW..HIGH (doubling) or NAME=LOW..HIGH:STEP.

    Args:
        options: What may be swept: by name, how a value is read, and what it may be.

    Raises:
        InvalidArgumentError: an unknown name, with the nearest; values that are none.
    """
    name, _, rest = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not rest:
        raise InvalidArgumentError(f"a sweep must have the form NAME=VALUES, got {text!r}")
    known = {RATE: (float, None), **options}
    if name not in known:
        raise unknown_name("a sweep", name, known)
    kind, choices = known[name]
    texts = _range(text, rest, kind) if ".." in rest else [value.strip() for value in rest.split(",")]
    return Sweep(name, tuple(_value(name, value, kind, choices) for value in texts))


def with_value(arguments: argparse.Namespace, sweep: Sweep, value: Any) -> argparse.Namespace:
    """The same arguments with another value of the option."""
    changed = argparse.Namespace(**vars(arguments))
    if sweep.name != RATE:
        setattr(changed, sweep.name, value)
    return changed


def _value(name: str, text: str, kind: Callable[[str], Any], choices: Sequence[Any] | None) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{name} must be {'an integer' if kind is int else 'a number'}, got {text!r}"
        ) from None
    if choices is not None and value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(str, choices))}, got {text!r}")
    return value


def _range(text: str, rest: str, kind: Callable[[str], Any]) -> list[str]:
    if kind not in (int, float):
        raise InvalidArgumentError(f"{text!r}: only numbers have a range; list the values with commas")
    span, _, step_text = rest.partition(":")
    low_text, _, high_text = span.partition("..")
    try:
        low, high = float(low_text), float(high_text)
        step = float(step_text) if step_text else None
    except ValueError:
        raise InvalidArgumentError(f"a range must have the form LOW..HIGH or LOW..HIGH:STEP, got {rest!r}") from None
    if not (0 < low <= high < float("inf")) or (step is not None and not step > 0):
        raise InvalidArgumentError(f"a range must go up from a number > 0, in steps > 0, got {rest!r}")
    values = []
    value = low
    while value <= high * (1 + 1e-9):
        values.append(f"{value:.12g}")
        if len(values) > _MOST_VALUES:
            raise InvalidArgumentError(f"a sweep must have at most {_MOST_VALUES} values, got more from {rest!r}")
        value = value * 2 if step is None else low + step * len(values)
    return values
