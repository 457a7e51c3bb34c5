"""Orca, OSDI 2022, simulated: GPT-3 175B on 16 A100-40GB, requests of many lengths, throughput at one latency.

After G. Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022), section
6.2 and figure 10. Prompts uniform from 32 to 512 tokens, outputs from 1 to 128, Poisson arrivals at many rates. Latency
is the median, over requests, of the time from arrival to return for each output token. The paper compares at 190 ms,
which it gives as twice what a request of 128 tokens takes alone; here it is twice what such a request takes in the
simulation.

The layers are split in two halves of 8 devices each. Orca keeps both halves busy with a batch each: that is simulated
as two replicas, each as fast as 8 devices would be with the whole model, and each with half of the KV blocks. Its
requests never end before their max_tokens, for which it reserves, so each asks for what it was drawn. FasterTransformer
ran best with microbatches as large as its batches, where one half waits for the other: one replica.

`static` is the engine's own policy, with each answer returned when its batch ends. `static, prompts cut` is
FasterTransformer as the paper describes it (see request_level.py). Each gets its best batch size at each latency.

python bench/replay/orca.py    # a minute; JSON and SVG into bench/results, a table to stdout
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from common import compare, factor_changes, finish, parse, say
from request_level import serve_request_level

from steploop import EngineConfig
from steploop.simulation import Deployment, find_device, find_model, simulate
from steploop.workload import Fixed, Gamma, Uniform, Workload, draw_workload

ORCA, STATIC, CUT = "iteration-level", "static", "static, prompts cut"
BATCH_SIZES = {ORCA: (8, 16, 32), STATIC: (1, 2, 4, 8, 16), CUT: (1, 2, 4, 8, 16)}
PUBLISHED = {"seconds": 0.190, "orca": 6.81, "fastertransformer": 0.185, "ratio": 36.9}
LONE = (128, 32)
"""Tokens of prompt and output of the request that the paper takes for the measure of latency."""
MULTIPLES = (1.5, 2.0, 3.0, 5.0)
"""Of what that request takes alone: the latencies compared at; 2 is the paper's."""
BLOCK_SIZE = 16
MAX_PROMPT, MAX_OUTPUT = 512, 128
RATES = (0.02, 60.0)
_PAIRS = ((f"{ORCA} / {STATIC}", STATIC), (f"{ORCA} / {CUT}", CUT))

_SHAPE = {"model": find_model("gpt3-175b"), "device": find_device("A100-40GB"), "weight_dtype": "float16"}
HALVES = Deployment(**_SHAPE, tensor_parallel_size=8, kv_cache_dtype="float16")
WHOLE = Deployment(**_SHAPE, tensor_parallel_size=16, kv_cache_dtype="float16")
"""For its memory: half of the layers on 8 devices are as large as all of them on 16."""
NUM_KV_BLOCKS = WHOLE.num_kv_blocks(BLOCK_SIZE, WHOLE.model.max_model_len)


def make_workload(rate: float, num_requests: int, seed: int) -> Workload:
    """The same requests at any rate."""
    lengths = (Uniform(32, MAX_PROMPT), Uniform(1, MAX_OUTPUT))
    return draw_workload(num_requests, lengths=lengths, arrivals=Gamma(rate), seed=seed)


def returned_at(system: str, batch_size: int, workload: Workload, deployment: Deployment) -> npt.NDArray[np.float64]:
    """[num_requests] When each answer is returned, in seconds."""
    if system == CUT:
        return serve_request_level(workload, deployment, batch_size)
    num_replicas = 2 if system == ORCA else 1
    engine = EngineConfig(
        model=deployment.model.name,
        scheduling_policy="reserve" if system == ORCA else "static",
        max_num_seqs=batch_size,
        max_num_batched_tokens=max(2048, batch_size * MAX_PROMPT),
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_KV_BLOCKS // num_replicas,
        enable_prefix_caching=False,
    )
    result = simulate(
        workload, deployment, engine, max_tokens=workload.num_output_tokens, num_replicas=num_replicas
    ).requests
    returned: npt.NDArray[np.int64] = result["last_token_us"].copy()
    if system == STATIC:  # those of a batch begin together
        _, batches = np.unique(result["scheduled_us"], return_inverse=True)
        ends = np.zeros(batches.max() + 1, np.int64)
        np.maximum.at(ends, batches, returned)
        returned = ends[batches]
    return returned / 1e6


def latency(system: str, batch_size: int, workload: Workload, deployment: Deployment) -> float:
    """The median of seconds for each output token."""
    waits = returned_at(system, batch_size, workload, deployment) - workload.arrival_times
    return float(np.median(waits / workload.num_output_tokens))


def lone_latency(deployment: Deployment) -> float:
    """The same of a request that is alone."""
    lengths = (Fixed(LONE[0]), Fixed(LONE[1]))
    return latency(ORCA, 1, draw_workload(1, lengths=lengths, arrivals=Gamma(1.0)), deployment)


def best_rate(
    system: str, seconds: float, deployment: Deployment, num_requests: int, seed: int
) -> tuple[float, int | None]:
    """The highest rate of arrivals at that latency, to 1%, and with which batch size; 0.0 and None: at no rate."""
    best: tuple[float, int | None] = (0.0, None)
    for batch_size in BATCH_SIZES[system]:
        low, high = max(RATES[0], best[0]), RATES[1]

        def is_fast(rate: float, batch_size: int = batch_size) -> bool:
            return latency(system, batch_size, make_workload(rate, num_requests, seed), deployment) <= seconds

        if not is_fast(low):
            continue
        while high / low > 1.01:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if is_fast(middle) else (low, middle)
        best = (low, batch_size)
    return best


def main(argv: list[str] | None = None) -> int:
    """Simulates, prints a table, writes JSON and SVG, returns the exit code."""
    args = parse(__doc__, "orca", argv)
    num_requests = 100 if args.quick else 1000
    at_latency = partial(best_rate, num_requests=num_requests, seed=args.seed)

    def figures(deployment: Deployment) -> dict[str, float]:
        say(".")
        seconds = 2 * lone_latency(deployment)
        rates = {system: at_latency(system, seconds, deployment)[0] for system in BATCH_SIZES}
        return {"seconds": seconds, **rates} | {name: rates[ORCA] / rates[system] for name, system in _PAIRS}

    lone = lone_latency(HALVES)
    levels = []
    for name, seconds in [*((f"{multiple:g}x", multiple * lone) for multiple in MULTIPLES), ("190 ms", 0.190)]:
        found = {system: at_latency(system, seconds, HALVES) for system in BATCH_SIZES}
        rates = {system: rate for system, (rate, _) in found.items()}
        sizes = {system: size for system, (_, size) in found.items()}
        ratios = {pair: rates[ORCA] / rates[system] if rates[system] else None for pair, system in _PAIRS}
        levels.append({"latency": name, "seconds": seconds, "rates": rates, "batch_sizes": sizes, "ratios": ratios})
    comparisons, runs = compare(
        HALVES,
        figures,
        [
            ("iteration-level over `static`", _PAIRS[0][0], PUBLISHED["ratio"], "x"),
            ("iteration-level over FasterTransformer's batches", _PAIRS[1][0], PUBLISHED["ratio"], "x"),
            ("iteration-level", ORCA, PUBLISHED["orca"], "requests/s"),
            ("FasterTransformer's batches", CUT, PUBLISHED["fastertransformer"], "requests/s"),
        ],
        factor_changes(quick=args.quick),
    )
    curves = draw_curves(num_requests, args.seed)
    result = {
        "title": "GPT-3 175B, 16 A100-40GB, at twice a lone request's latency",
        "source": "Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022)",
        "published": PUBLISHED,
        "settings": {
            "num_requests": num_requests,
            "prompt_lengths": f"uniform:32:{MAX_PROMPT}",
            "output_lengths": f"uniform:1:{MAX_OUTPUT}",
            "batch_sizes": BATCH_SIZES,
            "num_kv_blocks": NUM_KV_BLOCKS,
            "block_size": BLOCK_SIZE,
        },
        "lone_seconds": lone,
        "levels": levels,
        "curves": curves,
        "comparisons": comparisons,
        "other_factors": runs,
        "deployment": HALVES,
    }
    return finish(args, result, draw(curves, levels))


def draw_curves(num_requests: int, seed: int) -> list[dict[str, Any]]:
    """Latency against rate, by system and batch size."""
    curves = []
    for system, sizes in {ORCA: (8, 32), STATIC: (8, 16), CUT: (1, 8)}.items():
        for batch_size in sizes:
            rates = np.geomspace(0.05, 30, 28).tolist()
            seconds = [latency(system, batch_size, make_workload(rate, num_requests, seed), HALVES) for rate in rates]
            curves.append({"system": system, "batch_size": batch_size, "rates": rates, "seconds": seconds})
    return curves


def draw(curves: list[dict[str, Any]], levels: list[dict[str, Any]]) -> Any:
    """Latency against rate; the latencies that are compared at."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {ORCA: "#d55e00", STATIC: "#888888", CUT: "#0072b2"}
    for curve in curves:
        dashes = {1: ":", 8: "--", 16: "-.", 32: "-"}[curve["batch_size"]]
        label = f"{curve['system']}, {curve['batch_size']}"
        axes.plot(curve["rates"], np.array(curve["seconds"]) * 1e3, dashes, color=colours[curve["system"]], label=label)
    for level in levels:
        if level["latency"] in ("2x", "190 ms"):
            axes.axhline(level["seconds"] * 1e3, color="k", linewidth=0.8)
            name = "twice a lone request" if level["latency"] == "2x" else "190 ms"
            axes.annotate(name, (30, level["seconds"] * 1e3), fontsize="small", va="bottom", ha="right")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(0.05, 31),
        ylim=(30, 2000),
        xlabel="requests/s",
        ylabel="ms for each output token, median",
    )
    axes.set_title("GPT-3 175B: latency against load, by batch size")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(main())
