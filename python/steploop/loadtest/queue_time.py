"""The time that requests spend in a server's queue, by its own histogram at /metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES = ("steploop:request_queue_time_seconds", "vllm:request_queue_time_seconds")
_SAMPLE = re.compile(rf"^({'|'.join(_NAMES)})_(sum|count)(?:\{{.*\}})?[ \t]+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class QueueTimes:
    """Sum and number of all queue times since the server started."""

    name: str
    sum: float
    count: float


def parse_queue_times(text: str) -> QueueTimes | None:
    """The histogram's totals, over all of its labels, from Prometheus' text format; None: there is none."""
    totals = {"sum": 0.0, "count": 0.0}
    samples = _SAMPLE.findall(text)
    try:
        for _, kind, value in samples:
            totals[kind] += float(value)
    except ValueError:
        return None
    return QueueTimes(samples[0][0], **totals) if samples else None
