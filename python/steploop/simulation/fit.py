"""Fits the factors of the cost model to steps that were measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_OVERLAPS = np.linspace(0, 1, 11)
_CROSSINGS = np.geomspace(0.25, 512, 23)
_WIDTHS = (0.4, 0.1, 0.025, 0.006)  # of the search around the best point, which gets finer
_SMALLEST = 1e-12  # a rate that is not seen at all is very high, not infinite


WORK = ("num_tokens", "num_sequences", "num_sample_rows", "num_decode_keys", "num_prompt_pairs")
"""What a step does, as the native CostModel names it."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps in columns, one value a step: what each did, and how long it took."""

    work: dict[str, FloatArray]
    """The columns of WORK."""
    device_us: FloatArray
    """Forward pass and sampling."""
    host_us: FloatArray
    """The rest, up to the next step."""

    @property
    def total_us(self) -> FloatArray:
        """From a step's beginning to the next one's."""
        return self.device_us + self.host_us


@dataclass(frozen=True)
class FittedFactors:
    """Rates, in units of a second, and overheads in microseconds."""

    flops_per_second: float
    bytes_per_second: float
    overlap: float
    kv_bytes_per_second: float
    attention_flops_per_second: float
    step_us: float
    sequence_us: float
    sample_row_us: float


def fit_factors(steps: MeasuredSteps, amounts: Mapping[str, float]) -> FittedFactors:
    """Least squares of relative errors, all factors >= 0. All steps of one shape together count as much as of another.

    A duration is linear in all factors but two, where reading weights and computing with them cross and how far they
    overlap; those are searched for on a grid, and on ever finer ones around what was best.

    Args:
        amounts: weight_bytes, weight_flops_per_token, output_flops_per_row, kv_bytes_per_token and
            attention_flops_per_pair of the model, as in the native CostModel.
    """
    work = steps.work
    weights = _weights(work)
    host = _non_negative(
        np.stack([np.ones_like(steps.host_us), work["num_sequences"]], axis=1), steps.host_us, weights / steps.total_us
    )
    scale = weights / steps.device_us

    def best_of(crossings: FloatArray, overlaps: FloatArray) -> tuple[float, FloatArray, float, float]:
        fits = []
        for crossing, overlap in itertools.product(crossings.tolist(), overlaps.tolist()):
            columns = _device_columns(work, amounts, crossing, overlap)
            factors = _non_negative(columns, steps.device_us, scale)
            error = float((((columns @ factors - steps.device_us) * scale) ** 2).sum())
            fits.append((error, factors, crossing, overlap))
        return min(fits, key=lambda fit: fit[0])

    _, factors, crossing, overlap = best_of(_CROSSINGS, _OVERLAPS)
    for width in _WIDTHS:
        crossings = crossing * np.exp(np.linspace(-width, width, 11))
        overlaps = np.unique(np.clip(overlap + np.linspace(-width, width, 11), 0, 1))
        _, factors, crossing, overlap = best_of(crossings, overlaps)
    flop_us, key_us, pair_us, row_us = np.maximum(factors, _SMALLEST).tolist()
    flops_per_second = 1e6 / flop_us
    return FittedFactors(
        flops_per_second=flops_per_second,
        bytes_per_second=amounts["weight_bytes"] * flops_per_second / (amounts["weight_flops_per_token"] * crossing),
        overlap=float(overlap),
        kv_bytes_per_second=amounts["kv_bytes_per_token"] * 1e6 / key_us,
        attention_flops_per_second=amounts["attention_flops_per_pair"] * 1e6 / pair_us,
        step_us=float(host[0]),
        sequence_us=float(host[1]),
        sample_row_us=float(row_us),
    )


def _device_columns(
    work: Mapping[str, FloatArray], amounts: Mapping[str, float], crossing: float, overlap: float
) -> FloatArray:
    def linear(rows: FloatArray, flops_per_row: float) -> FloatArray:
        return flops_per_row * (np.maximum(crossing, rows) + (1 - overlap) * np.minimum(crossing, rows))

    rows = work["num_sample_rows"]
    flops = linear(work["num_tokens"], amounts["weight_flops_per_token"])
    flops = flops + np.where(rows > 0, linear(rows, amounts["output_flops_per_row"]), 0)
    return np.stack([flops, work["num_decode_keys"], work["num_prompt_pairs"], rows], axis=1)


def _weights(work: Mapping[str, FloatArray]) -> FloatArray:
    shapes = np.stack([work["num_tokens"], work["num_sequences"], work["num_sample_rows"]], axis=1)
    _, shape_of, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(1 / np.sqrt(counts[shape_of.reshape(-1)]), dtype=np.float64)


def _non_negative(columns: FloatArray, target: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted least squares with factors >= 0: of all choices of factors that are 0, the best whose others are not
    negative. There are few of them."""
    count = columns.shape[1]
    scaled, goal = columns * weights[:, None], target * weights
    best, least = np.zeros(count), float((goal**2).sum())
    for size in range(count, 0, -1):
        for chosen in itertools.combinations(range(count), size):
            some, *_ = np.linalg.lstsq(scaled[:, chosen], goal, rcond=None)
            error = float(((scaled[:, chosen] @ some - goal) ** 2).sum())
            if (some >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = some
        if least < float((goal**2).sum()) and (best > 0).sum() == size:
            break  # fewer factors fit no better
    return best
