"""What a machine allows and what a step must do: peaks that were probed, bytes to touch, operations to make."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

Line = dict[str, Any]
"""One result of a C++ micro-benchmark."""

ENGINE_SETTINGS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "float32": {"dtype": "float32"},
}
"""What makes an engine store its weights in each format."""

# Which probe of bench_peaks stands for the products of a format, by the instruction set of the kernels.
_FLOATS = {"float32": "vfmadd231ps_ymm", "bfloat16": "vfmadd231ps_ymm"}
_INSTRUCTIONS = {
    "avx512": {
        "float32": "vfmadd231ps_zmm",
        "bfloat16": "vdpbf16ps_zmm",
        "int8": "vpdpbusd_zmm",
        "int4": "vpdpbusd_zmm",
    },
    "avx512vnni": {
        "float32": "vfmadd231ps_zmm",
        "bfloat16": "vfmadd231ps_zmm",
        "int8": "vpdpbusd_zmm",
        "int4": "vpdpbusd_zmm",
    },
    "avxvnni": _FLOATS | {"int8": "vpdpbusd_ymm", "int4": "vpdpbusd_ymm"},
    "avx2": _FLOATS | {"int8": "vpmaddubsw_ymm", "int4": "vpmaddubsw_ymm"},
    "portable": {
        "float32": "multiply_add_float32",
        "bfloat16": "multiply_add_float32",
        "int8": "multiply_add_int16",
        "int4": "multiply_add_int16",
    },
}


class Peaks:
    """What each probe reached, in GB/s, GFLOP/s or GOP/s, by number of threads."""

    def __init__(self, isa: str, lines: list[Line]) -> None:
        """`isa`: of the kernels. `lines`: of several runs of bench_peaks. Of one probe the median counts, since other
        machines on the same host may slow a run down or leave it more memory bandwidth than usual; of the ways to read,
        the best one.
        """
        self.isa = isa
        runs: dict[tuple[str, str, int], list[float]] = {}
        for line in lines:
            kind, what, *variant, threads = line["name"].split("/")
            rate = next(line[unit] for unit in ("GB/s", "GFLOP/s", "GOP/s") if unit in line)
            probe = f"read_{what}" if kind == "read" else what
            runs.setdefault((probe, "/".join(variant), _threads(threads)), []).append(rate)
        self.rates: dict[str, dict[int, float]] = {}
        for (probe, _, num_threads), rates in runs.items():
            by_threads = self.rates.setdefault(probe, {})
            by_threads[num_threads] = max(median(rates), by_threads.get(num_threads, 0.0))

    def instruction(self, weight_format: str) -> str | None:
        """The probe that stands for products of this format; None: no probe does."""
        return _INSTRUCTIONS.get(self.isa, {}).get(weight_format)

    def arithmetic(self, weight_format: str, num_threads: int) -> float | None:
        """In GFLOP/s (GOP/s where the products are of integers); None: not probed."""
        return self.rates.get(self.instruction(weight_format) or "", {}).get(num_threads)

    def memory(self, num_threads: int) -> float | None:
        """Plain reads, in GB/s; None: not probed."""
        return self.rates.get("read_memory", {}).get(num_threads)


@dataclass(frozen=True)
class Work:
    """What must be done, however it is done."""

    num_bytes: float
    operations: dict[str, float]
    """By the format that they are made in; a multiplication and an addition are two."""

    def shares(self, seconds: float, num_threads: int, peaks: Peaks) -> Line:
        """The rates reached in `seconds`, their shares of the peaks, and which limit is the nearer one.

        The share of arithmetic is that of the time which the operations take at the peaks of their formats.
        """
        operations = sum(self.operations.values())
        memory = peaks.memory(num_threads)
        arithmetic_peaks = {name: peaks.arithmetic(name, num_threads) for name in self.operations}
        memory_share = None if memory is None else self.num_bytes * 1e-9 / memory / seconds
        arithmetic_share = None
        if all(arithmetic_peaks.values()):
            at_peak = sum(count * 1e-9 / (arithmetic_peaks[name] or 1) for name, count in self.operations.items())
            arithmetic_share = at_peak / seconds
        return {
            "gb_per_s": self.num_bytes * 1e-9 / seconds,
            "memory_share": memory_share,
            "gop_per_s": operations * 1e-9 / seconds,
            "arithmetic_share": arithmetic_share,
            "limit": "memory" if (memory_share or 0) >= (arithmetic_share or 0) else "arithmetic",
        }


def step_work(
    spec: Any, linear_weights: dict[str, Any], kv_bytes_per_token: int, kv_format: str, batch: int, context: float
) -> Work:
    """The work of a step in which `batch` sequences decode, `context` tokens each in the cache.

    It touches all linear weights, the sequences' keys and values, the new ones, and the logits. What else there is
    stays in caches or, as the rows of an embedding table, counts for nothing.

    Args:
        spec: The model's `ModelSpec`.
        linear_weights: By kind: "format" and "size_bytes", as `LLMEngine.stats` has it.
        kv_format: What attention's products are made in.
    """
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    products = {
        "qkv": spec.num_layers * spec.hidden_size * (q_size + 2 * kv_size),
        "o": spec.num_layers * q_size * spec.hidden_size,
        "gate_up": spec.num_layers * spec.hidden_size * 2 * spec.intermediate_size,
        "down": spec.num_layers * spec.intermediate_size * spec.hidden_size,
        "lm_head": spec.hidden_size * spec.vocab_size,
    }
    operations = {kv_format: 4.0 * batch * context * q_size * spec.num_layers}
    for kind, count in products.items():
        weight_format = linear_weights[kind]["format"]
        operations[weight_format] = operations.get(weight_format, 0.0) + 2.0 * batch * count
    num_bytes = float(sum(weights["size_bytes"] for weights in linear_weights.values()))
    num_bytes += batch * (context + 1) * kv_bytes_per_token
    num_bytes += batch * spec.vocab_size * 4
    return Work(num_bytes, operations)


def kernel_rows(lines: list[Line], peaks: Peaks) -> list[Line]:
    """The results of bench_linear and bench_attention beside the peaks, in their order."""
    rows = []
    for line in lines:
        *parts, threads = line["name"].split("/")
        # What a kernel's products are made in: attention's of 8-bit keys and values are bfloat16.
        weight_format = next((part for part in parts if part in ENGINE_SETTINGS), "bfloat16")
        if parts[0] == "attention" and weight_format == "int8":
            weight_format = "bfloat16"
        seconds = line["median_us"] * 1e-6
        num_threads = _threads(threads)
        work = Work(line.get("GB/s", 0.0) * 1e9 * seconds, {weight_format: line.get("GFLOP/s", 0.0) * 1e9 * seconds})
        shares = work.shares(seconds, num_threads, peaks)
        rows.append({"kernel": "/".join(parts), "num_threads": num_threads, "seconds": seconds, **shares})
    return rows


@dataclass(frozen=True)
class Fit:
    """The straight line through points, by least squares."""

    at_zero: float
    slope: float
    r_squared: float
    largest_deviation: float
    """Of a point from the line, as a share of the line there."""


def fit_line(points: list[tuple[float, float]]) -> Fit:
    """At least two points of different x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    at_zero = mean_y - slope * mean_x
    deviations = [(y - at_zero - slope * x, at_zero + slope * x) for x, y in points]
    total = sum((y - mean_y) ** 2 for _, y in points)
    r_squared = 1.0 if total == 0 else 1 - sum(difference**2 for difference, _ in deviations) / total
    return Fit(at_zero, slope, r_squared, max(abs(difference / on_line) for difference, on_line in deviations))


def _threads(part: str) -> int:
    return int(part.removeprefix("threads"))
