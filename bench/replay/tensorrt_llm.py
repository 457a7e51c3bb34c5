"""TensorRT-LLM's tables for Llama-3.3-70B on 4 H100, simulated: throughput by the largest batch allowed.

After the TensorRT-LLM documentation, "Benchmarking Default Performance" and "Tuning Max Batch Size and Max Num Tokens"
(version 0.16): bfloat16, tensor parallel over 4 H100 SXM 80 GB, 1000 requests of 2048 prompt and 2048 output tokens,
all sent at once, 8192 tokens in a step, prompts in chunks, KV blocks for the longest end of each request ("guaranteed
no evict") in 90% of the memory that the weights leave. Throughput counts outputs; the times of a single request are of
their latency benchmark, which runs one at a time.

python bench/replay/tensorrt_llm.py    # JSON and SVG into bench/results, a table to stdout
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import compare, factor_changes, finish, parse

from steploop import EngineConfig
from steploop.simulation import Deployment, SimulationResult, find_device, find_model, simulate, summarize
from steploop.workload import Burst, Fixed, Workload, draw_workload

BATCH_SIZES = (64, 512, 2048)
TOKENS_PER_SECOND = {64: 1944.3031, 512: 2466.7933, 2048: 2044.2628}
TTFT, ITL = 0.1477876, 0.0146554
"""Published seconds of a request alone, with 512."""
TOKENS = 2048
BLOCK_SIZE = 32
MAX_BATCHED_TOKENS = 8192
KV_SHARE = 0.9
POLICIES = ("reserve", "on_demand")
LESS_KV = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

_SHAPE = {"model": find_model("llama-3-70b"), "device": find_device("H100"), "tensor_parallel_size": 4}
_WEIGHTS = Deployment(**_SHAPE).weight_bytes / _SHAPE["device"].memory_bytes
DEPLOYMENT = Deployment(**_SHAPE, gpu_memory_utilization=_WEIGHTS + KV_SHARE * (1 - _WEIGHTS))


def make_workload(num_requests: int) -> Workload:
    """All alike: nothing is drawn."""
    return draw_workload(num_requests, lengths=(Fixed(TOKENS), Fixed(TOKENS)), arrivals=Burst())


def run(
    batch_size: int, workload: Workload, deployment: Deployment, policy: str = "reserve", kv_share: float = 1.0
) -> SimulationResult:
    """One cell; `kv_share`: of the KV cache that there is room for."""
    num_kv_blocks = deployment.num_kv_blocks(BLOCK_SIZE, 2 * TOKENS)
    engine = EngineConfig(
        model=deployment.model.name,
        scheduling_policy=policy,
        max_model_len=2 * TOKENS,
        max_num_seqs=batch_size,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        num_kv_blocks=int(num_kv_blocks * kv_share),
        enable_prefix_caching=False,
    )
    return simulate(workload, deployment, engine, max_tokens=TOKENS)


def throughput(batch_size: int, workload: Workload, deployment: Deployment, **options: Any) -> float:
    """Output tokens a second."""
    figures = summarize(run(batch_size, workload, deployment, **options))
    return float(figures["throughput"]["output_tokens_per_second"])


def main(argv: list[str] | None = None) -> int:
    """Simulates, prints a table, writes JSON and SVG, returns the exit code."""
    args = parse(__doc__, "tensorrt_llm", argv)
    num_requests = 250 if args.quick else 1000
    workload, alone = make_workload(num_requests), make_workload(1)

    def figures(deployment: Deployment) -> dict[str, float]:
        rates = {str(size): throughput(size, workload, deployment) for size in BATCH_SIZES}
        single = summarize(run(1, alone, deployment))["latencies"]
        ratios = {"512 / 64": rates["512"] / rates["64"], "2048 / 512": rates["2048"] / rates["512"]}
        return rates | ratios | {"ttft": single["ttft"]["mean"] * 1e3, "itl": single["itl"]["mean"] * 1e3}

    published = TOKENS_PER_SECOND
    comparisons, runs = compare(
        DEPLOYMENT,
        figures,
        [
            ("batch of 512 over 64", "512 / 64", published[512] / published[64], "x"),
            ("batch of 2048 over 512", "2048 / 512", published[2048] / published[512], "x"),
            *((f"batch of {size}, output", str(size), published[size], "tokens/s") for size in BATCH_SIZES),
            ("one request alone, first token", "ttft", TTFT * 1e3, "ms"),
            ("one request alone, between tokens", "itl", ITL * 1e3, "ms"),
        ],
        factor_changes(quick=args.quick),
    )
    cells = [describe(size, policy, workload) for policy in POLICIES for size in BATCH_SIZES]
    less_kv = [
        {"kv_share": share, "tokens_per_second": throughput(2048, workload, DEPLOYMENT, kv_share=share)}
        for share in LESS_KV
    ]
    result = {
        "title": "Llama-3.3-70B, 4 H100",
        "source": "TensorRT-LLM documentation, Tuning Max Batch Size and Max Num Tokens (version 0.16)",
        "published": {"output_tokens_per_second": published, "ttft": TTFT, "itl": ITL},
        "settings": {
            "num_requests": num_requests,
            "num_prompt_tokens": TOKENS,
            "num_output_tokens": TOKENS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "num_kv_blocks": DEPLOYMENT.num_kv_blocks(BLOCK_SIZE, 2 * TOKENS),
            "block_size": BLOCK_SIZE,
            "num_sequences_that_fit": DEPLOYMENT.num_kv_blocks(BLOCK_SIZE, 2 * TOKENS) * BLOCK_SIZE // (2 * TOKENS),
        },
        "cells": cells,
        "less_kv": less_kv,
        "comparisons": comparisons,
        "other_factors": runs,
        "deployment": DEPLOYMENT,
    }
    return finish(args, result, draw(cells))


def describe(batch_size: int, policy: str, workload: Workload) -> dict[str, Any]:
    """What is kept of a cell."""
    figures = summarize(run(batch_size, workload, DEPLOYMENT, policy))
    return {
        "batch_size": batch_size,
        "policy": policy,
        "tokens_per_second": figures["throughput"]["output_tokens_per_second"],
        "mean_sequences": figures["occupancy"]["mean_sequences"],
        "mean_kv_use": figures["kv_cache"]["mean_use"],
        "num_preemptions": figures["preemption"]["num_preemptions"],
        "num_recomputed_tokens": figures["preemption"]["num_recomputed_tokens"],
    }


def draw(cells: list[dict[str, Any]]) -> Any:
    """Throughput by batch size, published and of both policies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    lines = {"published": list(TOKENS_PER_SECOND.values())}
    lines |= {name: [cell["tokens_per_second"] for cell in cells if cell["policy"] == name] for name in POLICIES}
    positions = np.arange(len(BATCH_SIZES))
    for index, (name, colour) in enumerate(zip(lines, ("#333333", "#0072b2", "#d55e00"), strict=True)):
        bars = axes.bar(positions + 0.27 * (index - 1), lines[name], 0.25, color=colour, label=name)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize="small")
    axes.set_xticks(positions, [str(size) for size in BATCH_SIZES])
    axes.set(xlabel="largest batch allowed", ylabel="output tokens/s", title="Llama-3.3-70B on 4 H100")
    axes.margins(y=0.12)
    axes.legend(fontsize="small", loc="upper left")
    return figure


if __name__ == "__main__":
    sys.exit(main())
