"""What a workload came out as: its lengths and its arrivals in figures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from steploop.workload.sharing import share_of_known_tokens

if TYPE_CHECKING:
    from steploop.workload.columns import Segments, Workload


def summarize(workload: Workload) -> dict[str, Any]:
    """The figures by name.

    Returns:
        "prompt_tokens" and "output_tokens": count, total, mean, p50, p90, p99 and max; "arrivals": the duration in
        seconds, the rate (arrivals after the first, over the duration) and the coefficient of variation of the gaps,
        None where all come at once or there are too few, and of those that have bursts "burst_share", the share of
        arrivals in them; "fingerprint": the same for the same lengths, times, shared prefixes, tenants and priorities.
        Where there are such: "conversations": count, mean_turns and max_turns; "known_prompt_tokens": the share of
        them that an earlier prompt or its answer has; "tenants" and "priorities": count, and the largest_share of
        requests that one has; "num_skipped": recorded requests that were left out.
    """
    arrivals = _describe_arrivals(workload.arrival_times)
    if workload.burst_share is not None:
        arrivals["burst_share"] = workload.burst_share
    summary: dict[str, Any] = {
        "prompt_tokens": describe_lengths(workload.num_prompt_tokens),
        "output_tokens": describe_lengths(workload.num_output_tokens),
        "arrivals": arrivals,
        "fingerprint": _fingerprint(workload),
    }
    if workload.conversations is not None:
        turns = np.bincount(workload.conversations)
        turns = turns[turns > 0]
        summary["conversations"] = {
            "count": len(turns),
            "mean_turns": float(turns.mean()),
            "max_turns": int(turns.max()),
        }
    if workload.segments is not None:
        summary["known_prompt_tokens"] = {"share": share_of_known_tokens(workload)}
    for name, column in (("tenants", workload.tenants), ("priorities", workload.priorities)):
        if column is not None:
            counts = np.bincount(column)
            summary[name] = {
                "count": int(np.count_nonzero(counts)),
                "largest_share": float(counts.max() / len(column)),
            }
    if workload.num_skipped:
        summary["num_skipped"] = workload.num_skipped
    return summary


def describe_lengths(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Count, total, mean, p50, p90, p99 and max; of none, a count of 0 alone."""
    count = len(lengths)
    if not count:
        return {"count": 0}
    array = np.asarray(lengths)
    total = int(array.sum(dtype=np.int64))
    p50, p90, p99 = np.percentile(array, [50, 90, 99]).tolist()
    return {
        "count": count,
        "total": total,
        "mean": total / count,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": int(array.max()),
    }


def _describe_arrivals(times: npt.NDArray[np.float64]) -> dict[str, Any]:
    gaps = np.diff(times)
    duration = float(times[-1] - times[0])
    return {
        "duration": duration,
        "rate": len(gaps) / duration if duration > 0 else None,
        "coefficient_of_variation": float(gaps.std() / gaps.mean()) if duration > 0 and len(gaps) > 1 else None,
    }


def _fingerprint(workload: Workload) -> str:
    digest = hashlib.sha256()
    for column in (workload.num_prompt_tokens, workload.num_output_tokens, workload.arrival_times):
        digest.update(column.astype("<f8").tobytes())
    for name, columns in _more_columns(workload):
        digest.update(name.encode())
        for column in columns:
            digest.update(column.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _more_columns(workload: Workload) -> list[tuple[str, list[npt.NDArray[Any]]]]:
    """Those that not every workload has: one without keeps its fingerprint."""
    segments: Segments | None = workload.segments
    columns: dict[str, list[npt.NDArray[Any]] | None] = {
        "segments": None if segments is None else [segments.offsets, segments.contents, segments.lengths],
        "tenants": None if workload.tenants is None else [workload.tenants],
        "priorities": None if workload.priorities is None else [workload.priorities],
    }
    return [(name, arrays) for name, arrays in columns.items() if arrays is not None]
