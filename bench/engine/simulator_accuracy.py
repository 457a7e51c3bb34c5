"""How true the simulator is: the same requests served by the engine on this machine, and simulated.

Calibrated on the grid of `steploop simulate --device this-machine` alone; then five seeds that it has not seen, three
distributions of output lengths, three policies, a KV cache that is plenty and one that is scarce. All requests of a run
are offered at once, or (--arrivals poisson) at random times at four fifths of the rate that the simulator says can be
served. A real request is ended by its client after its last token, as variance.py describes.

A machine that others share changes its speed within minutes. So each seed's runs are between two passes over the grid,
and simulated with what both came to; each run is made several times, and its medians count. Beside how many simulated
figures are within a limit stands how many repeats are, as far from the mean of the others: what measuring once more
would have told.

python bench/engine/simulator_accuracy.py            # an hour; JSON into bench/results, a table to stdout
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import CpuUse, describe_machine, disturbers, wait_until_quiet
from script import RESULTS, add_wait_quiet, positive, say, write_json
from served import SharedModel

import steploop
from steploop import EngineConfig, LLMEngine, SamplingParams
from steploop.demo.model import find_demo_model
from steploop.simulation import Deployment, SimulationResult, find_model, simulate, summarize
from steploop.simulation.calibration import calibrate
from steploop.workload import Gamma, PromptMaker, Workload, draw_workload, parse_arrivals, parse_lengths

PROMPTS = "uniform:16:64"
OUTPUTS = {
    "uniform": "uniform:1:127",
    "exponential": "exponential:64:192:redraw",
    "lognormal": "lognormal:48:0.8:192:redraw",
}
POLICIES = ("static", "reserve", "on_demand")
KV = {"plenty": 1.0, "scarce": 0.125}
FIRST_SEED = 100
MAX_TOKENS = 192
"""What each request asks for."""
LONGEST = 64 + MAX_TOKENS
BLOCK_SIZE = 16
LIMITS = {"throughput": 0.10, "ttft": 0.15, "tpot": 0.15, "num_preemptions": 0.20}
"""How far off a figure may be, relative to what was measured."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """What a run is of."""

    arrivals: str
    seed: int
    outputs: str
    policy: str
    kv: str


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes JSON, returns the exit code."""
    args = _parse(argv)
    model = SharedModel(args.model, "bfloat16")
    runs: list[dict[str, Any]] = []
    calibrations = []
    for arrivals in args.arrivals:
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            wait_until_quiet({}, args.wait_quiet)
            deployments = [_calibrate(model, args)]
            measured: dict[Cell, tuple[Workload, list[Figures]]] = {}
            for _ in range(args.repeats):  # of all cells in turns, so that a machine that drifts drifts for all of them
                for outputs, kv, policy in itertools.product(args.outputs, args.kv, args.policies):
                    cell = Cell(arrivals, seed, outputs, policy, kv)
                    workload, real = measure(model, cell, deployments[0], args)
                    measured.setdefault(cell, (workload, []))[1].append(real)
                    say(f"{seed} {outputs} {kv} {policy}: {real['throughput']:.0f} tokens/s")
            deployments.append(_calibrate(model, args))
            for deployment in deployments:
                factors = vars(deployment.device) | {"efficiencies": vars(deployment.device.efficiencies)}
                calibrations.append({"arrivals": arrivals, "seed": seed, "device": factors})
            for cell, (workload, reals) in measured.items():
                both = [_figures(_simulate(cell, workload, deployment, args)) for deployment in deployments]
                simulated = {name: statistics.mean(one[name] for one in both) for name in both[0]}
                real = {name: statistics.median(one[name] for one in reals) for name in LIMITS}
                runs.append({**vars(cell), "real": real, "simulated": simulated, "repeats": reals})
    result = {
        "machine": describe_machine(),
        "versions": {"steploop": steploop.__version__},
        "settings": {
            "model": args.model.name,
            "dtype": "bfloat16",
            "num_threads": args.threads,
            "num_requests": args.num_requests,
            "repeats": args.repeats,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "prompts": PROMPTS,
            "outputs": OUTPUTS,
            "kv": KV,
        },
        "summary": summarise(runs),
        "calibrations": calibrations,
        "runs": runs,
    }
    write_json(args.output, result)
    print(format_table(result["summary"]))
    return 0


def measure(
    model: SharedModel, cell: Cell, deployment: Deployment, args: argparse.Namespace
) -> tuple[Workload, Figures]:
    """A workload, and what the engine made of it."""
    lengths = (parse_lengths(PROMPTS), parse_lengths(OUTPUTS[cell.outputs]))
    workload = draw_workload(args.num_requests, lengths=lengths, arrivals=parse_arrivals("burst"), seed=cell.seed)
    if cell.arrivals == "poisson":
        rate = 0.8 * args.num_requests / _simulate(cell, workload, deployment, args).duration
        workload = draw_workload(args.num_requests, lengths=lengths, arrivals=Gamma(rate), seed=cell.seed)
    engine = model.engine(num_threads=args.threads, seed=cell.seed, **_settings(cell, args))
    try:
        _serve(engine, workload.num_prompt_tokens[:2], workload.num_output_tokens[:2], np.zeros(2), 0)  # wakes it up
        engine.reset_prefix_cache()
        engine.iteration_stats()
        num_preemptions = engine.stats()["num_preemptions"]
        use = CpuUse({})
        figures = _serve(
            engine, workload.num_prompt_tokens, workload.num_output_tokens, workload.arrival_times, cell.seed
        )
        figures["quiet"] = not disturbers(use.cores(), "")
        figures["num_preemptions"] = engine.stats()["num_preemptions"] - num_preemptions
        return workload, figures
    finally:
        engine.close()


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By arrivals, policy and KV cache: relative errors of the simulated figures, and how many are within LIMITS."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["arrivals"], run["kv"], run["policy"]), []).append(run)
    rows = []
    for (arrivals, kv, policy), of_group in groups.items():
        row: dict[str, Any] = {"arrivals": arrivals, "kv": kv, "policy": policy, "num_runs": len(of_group)}
        for name, limit in LIMITS.items():
            errors = [_error(run["simulated"][name], run["real"][name]) for run in of_group]
            apart = [distance for run in of_group for distance in _apart([one[name] for one in run["repeats"]])]
            row[name] = {
                "median": statistics.median(errors),
                "worst": max(errors, key=abs),
                "num_within": sum(abs(error) <= limit for error in errors),
                "num_repeats": len(apart),
                "num_repeats_within": sum(abs(distance) <= limit for distance in apart),
            }
        row["throughput_real"] = statistics.median(run["real"]["throughput"] for run in of_group)
        row["num_preemptions_real"] = statistics.mean(run["real"]["num_preemptions"] for run in of_group)
        rows.append(row)
    return rows


def format_table(summary: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| arrivals | KV cache | policy | tokens/s, real | "
        + " | ".join(f"{name}: median (worst) error, within {limit:.0%}, repeats" for name, limit in LIMITS.items())
        + " |",
        "|" + "---|" * (4 + len(LIMITS)),
    ]
    for row in summary:
        cells = [
            f"{of['median']:+.1%} ({of['worst']:+.1%}), {of['num_within']}/{row['num_runs']}, "
            f"{of['num_repeats_within']}/{of['num_repeats']}"
            for of in (row[name] for name in LIMITS)
        ]
        head = [row["arrivals"], row["kv"], f"`{row['policy']}`", f"{row['throughput_real']:.0f}"]
        lines.append(f"| {' | '.join([*head, *cells])} |")
    return "\n".join(lines)


def _apart(repeats: Sequence[float]) -> list[float]:
    """Of each, how far the mean of the others is from it."""
    if len(repeats) < 2:
        return []
    return [_error((sum(repeats) - one) / (len(repeats) - 1), one) for one in repeats]


def _error(simulated: float, real: float) -> float:
    return simulated - real if real == 0 else simulated / real - 1


def _settings(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    longest = -(-LONGEST // BLOCK_SIZE)
    return {
        "scheduling_policy": cell.policy,
        "max_model_len": LONGEST,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": max(longest, round(KV[cell.kv] * args.max_num_seqs * longest)),
    }


def _simulate(cell: Cell, workload: Workload, deployment: Deployment, args: argparse.Namespace) -> SimulationResult:
    config = EngineConfig(model=args.model, **_settings(cell, args))
    return simulate(workload, deployment, config, max_tokens=MAX_TOKENS)


def _figures(result: SimulationResult) -> Figures:
    figures = summarize(result)
    return {
        "throughput": figures["throughput"]["output_tokens_per_second"],
        "ttft": figures["latencies"]["ttft"]["mean"],
        "tpot": figures["latencies"]["tpot"]["mean"],
        "num_preemptions": figures["preemption"]["num_preemptions"],
    }


def _serve(engine: LLMEngine, prompts: Any, outputs: Any, arrival_times: Any, seed: int) -> Figures:
    """Adds requests when they are due, steps until all have ended."""
    maker = PromptMaker(seed, 0, engine.vocab_size)
    token_ids = [maker.token_ids(index, length) for index, length in enumerate(prompts.tolist())]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    metrics: dict[str, Any] = {}
    started = time.monotonic()
    due = (started + arrival_times).tolist()
    next_due = 0
    while next_due < len(due) or engine.has_unfinished_requests():
        while next_due < len(due) and (due[next_due] <= time.monotonic() or not engine.has_unfinished_requests()):
            time.sleep(max(0.0, due[next_due] - time.monotonic()))
            prompt = {"prompt_token_ids": token_ids[next_due]}
            engine.add_request(str(next_due), prompt, params, arrival_time=due[next_due])
            next_due += 1
        for output in engine.step():
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens == outputs[int(output.request_id)]:
                metrics.setdefault(output.request_id, output.metrics)
                if not output.finished:
                    engine.abort_request(output.request_id)
    ended = max(of_request.last_token_time for of_request in metrics.values())
    ttft = [metrics[str(index)].first_token_time - due[index] for index in range(len(due))]
    tpot = [
        (metrics[str(index)].last_token_time - metrics[str(index)].first_token_time) / (length - 1)
        for index, length in enumerate(outputs.tolist())
        if length > 1
    ]
    return {
        "throughput": float(outputs.sum()) / (ended - started),
        "ttft": statistics.mean(ttft),
        "tpot": statistics.mean(tpot) if tpot else 0.0,
    }


def _calibrate(model: SharedModel, args: argparse.Namespace) -> Deployment:
    shape = find_model(str(args.model))
    engine = model.engine(
        num_threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=min(2048, shape.max_model_len),
    )
    try:
        calibration = calibrate(engine, shape, num_repeats=args.repeats)
    finally:
        engine.close()
    say(f"calibrated: off by {calibration.fit['median']:.1%} (median), {calibration.fit['p90']:.1%} (p90)")
    return Deployment(
        model=calibration.model,
        device=calibration.device,
        weight_dtype=calibration.weight_dtype,
        kv_cache_dtype=calibration.kv_cache_dtype,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--seeds", type=positive, default=5, help="how many; default 5")
    parser.add_argument("--outputs", nargs="+", choices=list(OUTPUTS), default=list(OUTPUTS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--kv", nargs="+", choices=list(KV), default=list(KV))
    parser.add_argument("--arrivals", nargs="+", choices=["burst", "poisson"], default=["burst"])
    parser.add_argument("--num-requests", type=positive, default=32)
    parser.add_argument("--max-num-seqs", type=positive, default=16)
    parser.add_argument("--max-num-batched-tokens", type=positive, default=512)
    parser.add_argument("--repeats", type=positive, default=3, help="of the grid in a pass, and of each run")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "simulator_accuracy.json")
    args = parser.parse_args(argv)
    args.model = args.model or find_demo_model()
    return args


if __name__ == "__main__":
    sys.exit(main())
