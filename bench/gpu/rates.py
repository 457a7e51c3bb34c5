"""Prints what the device can do, measured through torch: copy bandwidth, and bfloat16 products of several shapes."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from shapes import LLAMA_3_8B

COPY_BYTES = 2 * 2**30
MATMUL_SIZE = 8192
ROWS = (1, 8, 32, 128, 512, 2048)


def seconds_of(call: Callable[[int], object], num_calls: int, num_repeats: int = 7) -> float:
    """Of one call, as the device measures it: the median over the repeats. `call` gets the call's number."""
    for index in range(3):
        call(index)
    times = []
    for _ in range(num_repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in range(num_calls):
            call(index)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / num_calls)
    return sorted(times)[num_repeats // 2]


def main() -> None:
    """Measures and prints, line by line."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    seconds = seconds_of(lambda _: target.copy_(source), 4)
    print(json.dumps({"name": "copy", "gb_per_s": round(2 * COPY_BYTES / seconds * 1e-9, 1)}), flush=True)
    source = target = torch.empty(0)  # gives the memory back

    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda _: torch.mm(a, b), 10)
    rate = round(2 * MATMUL_SIZE**3 / seconds * 1e-12, 1)
    print(json.dumps({"name": "matmul", "size": MATMUL_SIZE, "tflop_per_s": rate}), flush=True)

    # The layers that our own product is timed at, for comparison.
    config = LLAMA_3_8B.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for layer, in_features, out_features in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
        # Several weights, which together exceed every cache.
        weights = [torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for rows in ROWS:
            x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
            seconds = seconds_of(lambda i, x=x, weights=weights: torch.mm(x, weights[i % 3].t()), 12)
            line = {
                "name": f"torch_mm/{LLAMA_3_8B.name}/{layer}/{in_features}x{out_features}/m{rows}",
                "median_us": round(seconds * 1e6, 2),
                "gb_per_s": round(2 * in_features * out_features / seconds * 1e-9, 1),
                "tflop_per_s": round(2 * rows * in_features * out_features / seconds * 1e-12, 2),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
