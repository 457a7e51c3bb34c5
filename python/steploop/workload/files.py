"""Files of recorded lengths and arrival times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steploop.checks import INT32_MAX, as_finite
from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import RecordedArrivals
from steploop.workload.lengths import RecordedLengths

LENGTH_NAMES = ("prompt_tokens", "output_tokens")
TIME_NAME = "timestamp"

_EXCERPT = 100


def read_lengths(path: str | Path) -> tuple[RecordedLengths, RecordedLengths]:
    """Prompt lengths and output lengths, the pairs in the file's order. Empty lines are skipped.

    A .jsonl file has an object with "prompt_tokens" and "output_tokens" on each line, among whatever else; any other
    file the two numbers with a comma between them, below a line `prompt_tokens,output_tokens` or not.

    Raises:
        InvalidArgumentError: an unreadable file, one without a pair, or a bad line, with its number.
    """
    prompts: list[int] = []
    outputs: list[int] = []
    for number, values in _rows(path, LENGTH_NAMES):
        for name, value, lengths in zip(LENGTH_NAMES, values, (prompts, outputs), strict=True):
            lengths.append(checked_length(f"{path}:{number}", name, value))
    if not prompts:
        raise InvalidArgumentError(f"{path} must have at least one pair of lengths, got none")
    return RecordedLengths(prompts, str(path)), RecordedLengths(outputs, str(path))


def read_arrivals(path: str | Path) -> RecordedArrivals:
    """Arrival times in seconds, whatever they are counted from. Empty lines are skipped.

    A .jsonl file has an object with "timestamp" on each line, among whatever else; any other file a number on each,
    below a line `timestamp` or not.

    Raises:
        InvalidArgumentError: an unreadable file, one without a time, or a bad line, with its number.
    """
    times: list[float] = []
    for number, (value,) in _rows(path, (TIME_NAME,)):
        time = as_finite(as_number(value))
        if time is None or time < 0:
            raise InvalidArgumentError(f"{path}:{number}: {TIME_NAME} must be seconds >= 0, got {excerpt(repr(value))}")
        if times and time < times[-1]:
            raise InvalidArgumentError(f"{path}:{number}: times must not go back, got {time:g} after {times[-1]:g}")
        times.append(time)
    if not times:
        raise InvalidArgumentError(f"{path} must have at least one arrival time, got none")
    return RecordedArrivals(times, str(path))


def read_text(path: str | Path) -> str:
    """All of a file, in UTF-8.

    Raises:
        InvalidArgumentError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None


def _rows(path: str | Path, names: tuple[str, ...]) -> Iterator[tuple[int, list[Any]]]:
    """(line number, the values under these names) for each line that has any."""
    lines = read_text(path).split("\n")
    is_json = Path(path).suffix == ".jsonl"
    is_first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        values = _json_values(f"{path}:{number}", line, names) if is_json else [v.strip() for v in line.split(",")]
        if not (is_first and not is_json and values == list(names)):
            if len(values) != len(names):
                raise InvalidArgumentError(
                    f"{path}:{number}: a line must have {','.join(names)}, got {len(values)} values"
                )
            yield number, values
        is_first = False


def _json_values(where: str, line: str, names: tuple[str, ...]) -> list[Any]:
    record = parse_record(where, line)
    missing = [name for name in names if name not in record]
    if missing:
        raise InvalidArgumentError(
            f"{where}: the object must have {' and '.join(missing)}, got {excerpt(str(sorted(record)))}"
        )
    return [record[name] for name in names]


def parse_record(where: str, line: str) -> dict[str, Any]:
    """The JSON object on a line.

    Raises:
        InvalidArgumentError: there is none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{where}: a line must be JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidArgumentError(f"{where}: a line must be a JSON object, got {excerpt(line.strip())!r}")
    return record


def excerpt(text: str) -> str:
    """Its beginning, short enough for a message."""
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


def checked_length(where: str, name: str, value: Any) -> int:
    """A number of tokens.

    Raises:
        InvalidArgumentError: it is none.
    """
    number = as_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= INT32_MAX:
        raise InvalidArgumentError(f"{where}: {name} must be an integer in 1..{INT32_MAX}, got {excerpt(repr(value))}")
    return number


def as_number(value: Any) -> Any:
    """What a text stands for; a whole number as an int."""
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return math.nan
