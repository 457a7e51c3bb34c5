"""What a workload came out as: its lengths and its arrivals in figures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def summarize(
    prompt_lengths: Sequence[int], output_lengths: Sequence[int], arrival_times: Sequence[float]
) -> dict[str, Any]:
    """The figures by name.

    Returns:
        "prompt_tokens" and "output_tokens": count, total, mean, p50, p90, p99 and max; "arrivals": the duration in
        seconds, the rate (arrivals after the first, over the duration) and the coefficient of variation of the gaps,
        None where all come at once or there are too few; "fingerprint": the same for the same lengths and times.
    """
    return {
        "prompt_tokens": describe_lengths(prompt_lengths),
        "output_tokens": describe_lengths(output_lengths),
        "arrivals": _describe_arrivals(np.asarray(arrival_times, dtype=np.float64)),
        "fingerprint": _fingerprint(prompt_lengths, output_lengths, arrival_times),
    }


def describe_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Count, total, mean, p50, p90, p99 and max; of none, a count of 0 alone."""
    if not lengths:
        return {"count": 0}
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return {
        "count": len(lengths),
        "total": sum(lengths),
        "mean": sum(lengths) / len(lengths),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(lengths),
    }


def _describe_arrivals(times: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    gaps = np.diff(times)
    duration = float(times[-1] - times[0])
    return {
        "duration": duration,
        "rate": len(gaps) / duration if duration > 0 else None,
        "coefficient_of_variation": float(gaps.std() / gaps.mean()) if duration > 0 and len(gaps) > 1 else None,
    }


def _fingerprint(*columns: Sequence[float]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(np.asarray(column, dtype="<f8").tobytes())
    return digest.hexdigest()[:16]
