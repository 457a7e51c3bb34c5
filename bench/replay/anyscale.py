"""Anyscale 2023, simulated: OPT-13B on an A100-40GB, static against continuous batching as output lengths vary.

After C. Daniel, C. Shen, E. Liang and R. Liaw, "How continuous batching enables 23x throughput in LLM inference while
reducing p50 latency" (2023), and the scripts that they published with it. 1000 prompts of 512 tokens, all there at the
beginning; outputs exponential with mean 128, drawn again above a cap of 32, 128, 512 or 1536 tokens. Throughput counts
prompts and outputs.

`static` is their FasterTransformer: batches of 16, 12, 8 and 4 by the cap. `reserve` has continuous batching without
pages: every request asks for the cap, and blocks are held for that. `reserve, told the length` is what their servers
without pages were given: room for 8,100 tokens or so, and with each request the length that it would really have.
`on_demand` is vLLM's, which needs to know neither. All of them compute whole prompts in steps of their own, as those
systems did: with the text-generation-inference server's rules where they have 8,100 tokens, else as soon as there is
room. "With their pauses": the loop that fed FasterTransformer slept for a second before each batch, the one around vLLM
for 10 ms before each step.

Their naive baseline, Hugging Face's pipeline, ran the same static batches as FasterTransformer at a quarter of the
speed. Scheduling has no part in that, so it is not simulated, and ratios over it are divided by its 4.

python bench/replay/anyscale.py    # JSON and SVG into bench/results, a table to stdout
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
from common import compare, factor_changes, finish, parse, with_factors

from steploop import EngineConfig
from steploop.simulation import Deployment, SimulationResult, find_device, find_model, simulate, summarize
from steploop.simulation.plot import draw_slots
from steploop.workload import Burst, Cap, Exponential, Fixed, Workload, draw_workload

CAPS = (32, 128, 512, 1536)
STATIC_BATCH = {32: 16, 128: 12, 512: 8, 1536: 4}
TOLD_TOKENS = {32: 8700, 128: 7500, 512: 8100, 1536: 8100}
"""What the published servers might hold without pages, and vLLM might put into a step of prompts."""
MAX_MODEL_LEN = 2048
PROMPT, MEAN_OUTPUT = 512, 128
BLOCK_SIZE = 16
NAIVE = 81.0
"""Published tokens a second of the naive baseline at the highest cap."""
OVER_NAIVE = {"static": 4.0, "reserve, told the length": 8.0, "on_demand": 23.0}

BATCH_PAUSE_S, STEP_PAUSE_US = 1.0, 10_000.0

DEPLOYMENT = Deployment(model=find_model("opt-13b"), device=find_device("A100-40GB"), weight_dtype="float16")


class Policy(NamedTuple):
    """One of the lines."""

    name: str
    colour: str
    dashes: str


POLICIES = (
    Policy("static", "#888888", "--"),
    Policy("reserve", "#0072b2", "-"),
    Policy("reserve, told the length", "#56b4e9", ":"),
    Policy("on_demand", "#d55e00", "-"),
)


def make_workload(cap: int, num_requests: int, seed: int) -> Workload:
    """The requests of one cap."""
    lengths = (Fixed(PROMPT), Exponential(MEAN_OUTPUT, Cap(cap, "redraw")))
    return draw_workload(num_requests, lengths=lengths, arrivals=Burst(), seed=seed)


def run(policy: str, cap: int, workload: Workload, deployment: Deployment, **options: Any) -> SimulationResult:
    """One cell."""
    told = policy == "reserve, told the length"
    engine = EngineConfig(
        model=deployment.model.name,
        scheduling_policy="reserve" if told else policy,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_kv_blocks=TOLD_TOKENS[cap] // BLOCK_SIZE if told else None,
        max_num_seqs=STATIC_BATCH[cap] if policy == "static" else 256,
        max_num_batched_tokens=STATIC_BATCH[cap] * PROMPT if policy == "static" else TOLD_TOKENS[cap],
        enable_chunked_prefill=False,
        waiting_served_ratio=1.2 if told else 0.0,
        max_waiting_tokens=7 if told else 0,
        enable_prefix_caching=False,
    )
    return simulate(workload, deployment, engine, max_tokens=workload.num_output_tokens if told else cap, **options)


def throughput(policy: str, cap: int, workload: Workload, deployment: Deployment) -> float:
    """Tokens a second, prompts and outputs."""
    return float(summarize(run(policy, cap, workload, deployment))["throughput"]["total_tokens_per_second"])


def with_pauses(static_rate: float, workload: Workload, deployment: Deployment) -> dict[str, float]:
    """The same of `static` and `on_demand` at the highest cap, with the pauses of the loops around them."""
    num_tokens = int(workload.num_prompt_tokens.sum() + workload.num_output_tokens.sum())
    pauses = math.ceil(len(workload) / STATIC_BATCH[1536]) * BATCH_PAUSE_S
    step_us = deployment.device.efficiencies.step_us + STEP_PAUSE_US
    paused = with_factors(deployment, {"step_us": step_us})
    return {
        "static, paused": num_tokens / (num_tokens / static_rate + pauses),
        "on_demand, paused": throughput("on_demand", 1536, workload, paused),
    }


def main(argv: list[str] | None = None) -> int:
    """Simulates, prints a table, writes JSON and SVG, returns the exit code."""
    args = parse(__doc__, "anyscale", argv)
    num_requests = 300 if args.quick else 1000
    workloads = {cap: make_workload(cap, num_requests, args.seed) for cap in CAPS}
    cells = [describe(policy.name, cap, workloads[cap]) for cap in CAPS for policy in POLICIES]

    def figures(deployment: Deployment) -> dict[str, float]:
        workload = workloads[1536]
        rates = {policy.name: throughput(policy.name, 1536, workload, deployment) for policy in POLICIES}
        rates |= with_pauses(rates["static"], workload, deployment)
        over_static = {f"{name} / static": rate / rates["static"] for name, rate in rates.items()}
        return rates | over_static | {"paused ratio": rates["on_demand, paused"] / rates["static, paused"]}

    continuous, paged = (OVER_NAIVE[name] / OVER_NAIVE["static"] for name in ("reserve, told the length", "on_demand"))
    comparisons, runs = compare(
        DEPLOYMENT,
        figures,
        [
            ("a better implementation of the model, both static", None, OVER_NAIVE["static"], "x"),
            ("continuous, `reserve` up to the cap, over static", "reserve / static", continuous, "x"),
            (
                "continuous, `reserve` of the very length, over static",
                "reserve, told the length / static",
                continuous,
                "x",
            ),
            ("continuous and paged, `on_demand`, over static", "on_demand / static", paged, "x"),
            ("the same, with their pauses", "paused ratio", paged, "x"),
            (
                "static, prompt and output, with their pauses",
                "static, paused",
                NAIVE * OVER_NAIVE["static"],
                "tokens/s",
            ),
            (
                "continuous, `reserve` of the very length",
                "reserve, told the length",
                NAIVE * OVER_NAIVE["reserve, told the length"],
                "tokens/s",
            ),
            (
                "continuous and paged, `on_demand`, with their pauses",
                "on_demand, paused",
                NAIVE * OVER_NAIVE["on_demand"],
                "tokens/s",
            ),
        ],
        factor_changes(quick=args.quick),
    )
    result = {
        "title": "OPT-13B, A100-40GB, outputs up to 1536",
        "source": "Anyscale, How continuous batching enables 23x throughput in LLM inference (2023)",
        "published": {"naive_tokens_per_second": NAIVE, "over_naive": OVER_NAIVE, "cap": 1536},
        "settings": {
            "num_requests": num_requests,
            "num_prompt_tokens": PROMPT,
            "mean_output_tokens": MEAN_OUTPUT,
            "static_batch": STATIC_BATCH,
            "told_tokens": TOLD_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "num_kv_blocks": DEPLOYMENT.num_kv_blocks(BLOCK_SIZE, MAX_MODEL_LEN),
            "block_size": BLOCK_SIZE,
        },
        "cells": cells,
        "comparisons": comparisons,
        "other_factors": runs,
        "deployment": DEPLOYMENT,
    }
    return finish(args, result, draw(cells, workloads[1536]))


def describe(policy: str, cap: int, workload: Workload) -> dict[str, Any]:
    """What is kept of a cell."""
    figures = summarize(run(policy, cap, workload, DEPLOYMENT))
    return {
        "policy": policy,
        "cap": cap,
        "tokens_per_second": figures["throughput"]["total_tokens_per_second"],
        "mean_sequences": figures["occupancy"]["mean_sequences"],
        "share_of_slots": figures["occupancy"]["share_of_slots"],
        "mean_kv_use": figures["kv_cache"]["mean_use"],
        "num_preemptions": figures["preemption"]["num_preemptions"],
        "num_steps": figures["steps"]["count"],
        "mean_output_tokens": float(workload.num_output_tokens.mean()),
    }


def draw(cells: list[dict[str, Any]], workload: Workload) -> Any:
    """Slots over time at the highest cap, and throughput by cap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.2), layout="constrained")
    top, middle, bottom = figure.subplots(3, height_ratios=(1, 3, 4))
    for axes, policy in ((top, "static"), (middle, "on_demand")):
        draw_slots(axes, run(policy, 1536, workload, DEPLOYMENT, record_spans=True), until=40.0)
        slots = max(bar.get_y() for bar in axes.patches) + 1
        axes.set(title=f"Who has a place in the batch, {policy}, outputs up to 1536", ylim=(0, slots))
    positions = np.arange(len(CAPS))
    for policy in POLICIES:
        rates = [cell["tokens_per_second"] for cell in cells if cell["policy"] == policy.name]
        bottom.plot(positions, rates, policy.dashes, color=policy.colour, marker="o", label=policy.name)
        if policy.name in OVER_NAIVE:
            bottom.plot(
                positions[-1] + 0.12,
                NAIVE * OVER_NAIVE[policy.name],
                "D",
                color=policy.colour,
                label=f"published: {OVER_NAIVE[policy.name]:g} x {NAIVE:g}",
            )
    bottom.plot(positions[-1] + 0.12, NAIVE, "Dk", label=f"published: naive, {NAIVE:g}")
    bottom.set_xticks(positions, [str(cap) for cap in CAPS])
    bottom.set(xlabel="longest output allowed", ylabel="tokens/s, prompt and output", yscale="log", title="Throughput")
    bottom.grid(alpha=0.3)
    bottom.legend(fontsize="small", ncols=2)
    return figure


if __name__ == "__main__":
    sys.exit(main())
