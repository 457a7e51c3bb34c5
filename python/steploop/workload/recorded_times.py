"""RecordedClock: reads the timestamps of a file, as seconds or as dates with times."""

from __future__ import annotations

import datetime
import functools
import re
from typing import Any

from steploop.checks import as_finite
from steploop.errors import InvalidArgumentError
from steploop.workload.files import as_number, excerpt

_DATE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d):(\d\d):(\d\d(?:\.\d+)?)(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII)


class RecordedClock:
    """Its first timestamp says how they are all written.

    Args:
        unit: Seconds in one, where they are plain numbers.
    """

    def __init__(self, unit: float = 1.0) -> None:
        self._unit = unit
        self._kind: str | None = None
        self._first_day = 0

    def seconds(self, where: str, name: str, value: Any) -> float:
        """Seconds, >= 0 where they are plain numbers; dates count from the first one's.

        Raises:
            InvalidArgumentError: it is neither, or not written as the first one was.
        """
        kind, seconds = self._read(value)
        if kind is None:
            raise InvalidArgumentError(
                f"{where}: {name} must be a number >= 0, or a date and time such as 2023-11-16 18:15:46.68, "
                f"got {excerpt(repr(value))}"
            )
        if self._kind not in (None, kind):
            raise InvalidArgumentError(
                f"{where}: {name} must be {self._kind} as in the lines before, got {excerpt(repr(value))}"
            )
        self._kind = kind
        return seconds

    def _read(self, value: Any) -> tuple[str | None, float]:
        parts = _DATE_TIME.fullmatch(value.strip()) if isinstance(value, str) else None
        if parts is None:
            number = as_finite(as_number(value))
            return (None, 0.0) if number is None or number < 0 else ("a number", number * self._unit)
        date, hour, minute, second, utc, sign, zone_hours, zone_minutes = parts.groups()
        day = _day(date)
        if day is None or int(hour) > 23 or int(minute) > 59 or float(second) >= 61:
            return None, 0.0
        # Days are counted from the first, so that fractions of a microsecond are left in a float.
        self._first_day = self._first_day or day
        seconds = (day - self._first_day) * 86400 + int(hour) * 3600 + int(minute) * 60 + float(second)
        if sign is not None:
            seconds -= (-1 if sign == "-" else 1) * (int(zone_hours) * 3600 + int(zone_minutes) * 60)
        return ("a date and time with its zone" if utc or sign else "a date and time without a zone"), seconds


@functools.lru_cache(maxsize=16)
def _day(date: str) -> int | None:
    """The day's number; None: there is no such day."""
    try:
        return datetime.date.fromisoformat(date).toordinal()
    except ValueError:
        return None
