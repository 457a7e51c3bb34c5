"""What a run comes to: throughput, latencies, goodput, failures and the client's own share, by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from steploop.loadtest.open_loop import RunResult
from steploop.loadtest.record import RequestRecord
from steploop.loadtest.slo import meets
from steploop.loadtest.warnings import find_warnings
from steploop.workload.summary import describe_lengths

STATES = ("completed", "failed", "unfinished", "not_sent")


def summarize_run(
    result: RunResult, slo: dict[str, float] | None, num_warmups: int, share_known: float = 0.0
) -> dict[str, Any]:
    """The figures of a run; times in seconds. `share_known` is that of the prompts' tokens which earlier requests of
    the workload had: no more than this can be in a prefix cache because of them.

    Latencies are of completed requests; "num_missing" says of how many requests there is none, so that no failure goes
    unseen.
    """
    records, duration = result.records, result.duration
    completed = [record for record in records if record.state == "completed"]
    figures: dict[str, Any] = {
        "incomplete": result.interrupted,
        "duration": duration,
        "requests": {"asked": len(records), **count_states(records)},
        "num_warmups": num_warmups,
        "errors": _errors(records),
        "throughput": _throughput(completed, duration),
        "latencies": _latencies(completed, len(records)),
        "queue_time": _queue_time(result, completed),
        "goodput": None if slo is None else _goodput(records, slo, duration),
        "lengths": _lengths(records, completed),
        "prefix_cache": _prefix_cache(completed),
        "in_flight": _in_flight_figures(result),
        "steps": _steps(result),
        "client": _client(result),
    }
    figures["warnings"] = find_warnings(figures, share_known)
    return figures


def count_states(records: Iterable[RequestRecord]) -> dict[str, int]:
    """How many requests are in each of STATES."""
    counts = Counter(record.state for record in records)
    return {state: counts[state] for state in STATES}


def describe(values: Sequence[float], *, num_missing: int = 0) -> dict[str, Any]:
    """Mean, p50, p90, p99 and max (None of no values), how many values there are, and how many are missing."""
    names = ("p50", "p90", "p99", "max")
    quantiles = np.percentile(values, [50, 90, 99, 100]).tolist() if len(values) else [None] * len(names)
    return {
        "mean": float(np.mean(values)) if len(values) else None,
        **dict(zip(names, quantiles, strict=True)),
        "count": len(values),
        "num_missing": num_missing,
    }


def in_flight(records: Iterable[RequestRecord], end_time: float) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), whenever that changes."""
    changes: Counter[float] = Counter()
    for record in records:
        if record.sent_time is not None:
            changes[record.sent_time] += 1
            changes[end_time if record.end_time is None else record.end_time] -= 1
    times = sorted(changes)
    return list(zip(times, itertools.accumulate(changes[time] for time in times), strict=True))


def request_rows(result: RunResult) -> list[dict[str, Any]]:
    """Every request by itself; times in seconds from the start of the run."""

    def since(time: float | None) -> float | None:
        return None if time is None else time - result.start_time

    return [
        {
            "index": record.index,
            "state": record.state,
            "due": since(record.due_time),
            "sent": since(record.sent_time),
            "end": since(record.end_time),
            "ttft": record.ttft,
            "tpot": record.tpot,
            "longest_gap": record.longest_gap,
            "e2e": record.e2e if record.state == "completed" else None,
            "queue_time": record.queue_time,
            "num_arrivals": len(record.arrivals),
            "num_prompt_tokens_asked": record.num_prompt_tokens_asked,
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_output_tokens_asked": record.num_output_tokens_asked,
            "num_output_tokens": record.num_output_tokens,
            "error": record.error,
            "error_detail": record.error_detail,
        }
        for record in result.records
    ]


def _errors(records: Iterable[RequestRecord]) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for record in records:
        if record.error is not None:
            entry = errors.setdefault(record.error, {"count": 0, "example": record.error_detail})
            entry["count"] += 1
    return errors


def _throughput(completed: Sequence[RequestRecord], duration: float) -> dict[str, float]:
    num_input = sum(record.num_prompt_tokens or 0 for record in completed)
    num_output = sum(record.num_output_tokens_known for record in completed)
    return {
        "requests_per_second": len(completed) / duration,
        "input_tokens_per_second": num_input / duration,
        "output_tokens_per_second": num_output / duration,
        "total_tokens_per_second": (num_input + num_output) / duration,
    }


def _latencies(completed: Sequence[RequestRecord], num_asked: int) -> dict[str, Any]:
    def of_each(name: str) -> dict[str, Any]:
        values = [value for record in completed if (value := getattr(record, name)) is not None]
        return describe(values, num_missing=num_asked - len(values))

    gaps = [record.gaps() for record in completed]
    num_without_gaps = num_asked - sum(bool(of_record) for of_record in gaps)
    per_token = [seconds / count for of_record in gaps for _, seconds, count in of_record for _ in range(count)]
    return {
        "ttft": of_each("ttft"),
        "tpot": of_each("tpot"),
        "itl": describe(per_token, num_missing=num_without_gaps),
        "chunk_gap": describe(
            [seconds for of_record in gaps for _, seconds, _ in of_record], num_missing=num_without_gaps
        ),
        "e2e": of_each("e2e"),
    }


def _queue_time(result: RunResult, completed: Sequence[RequestRecord]) -> dict[str, Any]:
    values = [record.queue_time for record in completed if record.queue_time is not None]
    figures = describe(values, num_missing=len(result.records) - len(values))
    if result.target.mean_queue_time is not None:
        # The server's histogram: of whatever it served, and its quantiles are no better than its buckets.
        figures |= {
            "mean": result.target.mean_queue_time,
            "count": result.target.num_queue_times,
            "num_missing": max(0, len(result.records) - result.target.num_queue_times),
        }
    return figures | {"source": result.target.queue_time_source}


def _goodput(records: Sequence[RequestRecord], slo: dict[str, float], duration: float) -> dict[str, Any]:
    num_good = sum(meets(record, slo) for record in records)
    return {
        "slo": slo,
        "num_good": num_good,
        "share_of_asked": num_good / len(records),
        "requests_per_second": num_good / duration,
    }


def _lengths(records: Sequence[RequestRecord], completed: Sequence[RequestRecord]) -> dict[str, Any]:
    counted = [record for record in completed if record.num_output_tokens is not None]
    return {
        "prompt_asked": describe_lengths([record.num_prompt_tokens_asked for record in records]),
        "prompt_got": describe_lengths(
            [record.num_prompt_tokens for record in completed if record.num_prompt_tokens is not None]
        ),
        "output_asked": describe_lengths([record.num_output_tokens_asked for record in records]),
        "output_got": describe_lengths([record.num_output_tokens_known for record in completed]),
        "num_truncated": sum(record.num_output_tokens_known < record.num_output_tokens_asked for record in counted),
        "num_longer": sum(record.num_output_tokens_known > record.num_output_tokens_asked for record in counted),
        "num_without_usage": len(completed) - len(counted),
    }


def _prefix_cache(completed: Sequence[RequestRecord]) -> dict[str, Any]:
    known = [record for record in completed if record.num_cached_tokens is not None]
    num_cached = sum(record.num_cached_tokens or 0 for record in known)
    num_prompt = sum(record.num_prompt_tokens or 0 for record in known)
    return {
        "num_cached_tokens": num_cached if known else None,
        "share_of_prompt_tokens": num_cached / num_prompt if num_prompt else None,
    }


def _in_flight_figures(result: RunResult) -> dict[str, Any]:
    steps = [*in_flight(result.records, result.end_time), (result.end_time, 0)]
    busy = sum((after[0] - before[0]) * before[1] for before, after in itertools.pairwise(steps))
    return {"mean": busy / result.duration, "max": max(number for _, number in steps)}


def _steps(result: RunResult) -> dict[str, Any] | None:
    iterations = result.target.iterations
    if iterations is None:
        return None
    scheduled = [iteration["num_scheduled_requests"] for iteration in iterations]
    return {
        "count": len(iterations),
        "num_lost": result.target.num_iterations_lost,
        "mean_scheduled": float(np.mean(scheduled)) if scheduled else None,
        "max_scheduled": max(scheduled, default=None),
        "num_preemptions": sum(iteration["num_preemptions"] for iteration in iterations),
    }


def _client(result: RunResult) -> dict[str, Any]:
    started = [record for record in result.records if record.started_time is not None]
    sent = [record for record in started if record.sent_time is not None]
    return {
        "lateness": describe([(record.started_time or 0.0) - record.due_time for record in started]),
        "concurrency_wait": describe([(record.sent_time or 0.0) - (record.started_time or 0.0) for record in sent]),
        "loop_lag": describe(result.lags),
        "cpu_share": result.cpu_share,
    }
