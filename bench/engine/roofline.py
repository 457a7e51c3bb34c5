"""How close the engine comes to what the machine allows.

Peaks of arithmetic and memory are probed; beside them stand, measured in the same run: every kernel, whole decode steps
by batch, one thread against all, where the time of a step goes, and how it grows with the tokens in the cache.

python bench/engine/roofline.py                              # the demo model in bfloat16
python bench/engine/roofline.py --formats bfloat16 int8      # weights in other formats
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from machine import CpuUse, describe_machine, wait_until_quiet
from roofline_model import ENGINE_SETTINGS, Line, Peaks, kernel_rows, step_work
from roofline_report import format_report
from roofline_steps import MAX_OUTPUT_TOKENS, NUM_SPARE_TOKENS, Steps
from script import add_wait_quiet, positive, say, write_json

import steploop
from steploop import _C
from steploop.demo.model import find_demo_model
from steploop.weights import open_checkpoint

PROGRAMS = Path(__file__).parents[2] / "build/bench/bench/micro"
BATCHES = (1, 8, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 6144, 8192)
PARTS = ("kernels", "steps", "profile", "contexts")


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, returns the exit code."""
    args = _parse(argv)
    try:
        result = _measure(args)
    except RuntimeError as error:
        say(str(error))
        return 1
    if args.output:
        write_json(args.output, result)
    print(format_report(result))
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    isa = _run_program(args, "bench_linear", "--filter", "none")[0]["isa"]
    parts: dict[str, Callable[[], Any]] = {}
    if "kernels" in args.parts:
        parts["kernels"] = partial(_run_kernels, args)
    if args.parts != ["kernels"]:
        parts |= {name: partial(_measure_format, args, name) for name in args.formats}
    measured: dict[str, Any] = {}
    cores_of_others: dict[str, dict[str, float]] = {}
    # Before and after each part: a virtual machine's share of its host's memory bandwidth comes and goes.
    probes = [_run_program(args, "bench_peaks")]
    for name, measure in parts.items():
        wait_until_quiet({}, args.wait_quiet)
        say(f"measuring {name} ...")
        use = CpuUse({})
        measured[name] = measure()
        cores_of_others[name] = use.cores()
        probes.append(_run_program(args, "bench_peaks"))
    peaks = {name: Peaks(isa, probes[i] + probes[i + 1]) for i, name in enumerate(parts)}
    kernels = measured.pop("kernels", None)
    spec = open_checkpoint(str(args.model), None).spec
    return {
        "machine": describe_machine(),
        "versions": {"steploop": steploop.__version__},
        "settings": {
            "model": args.model.name,  # a name, not where it lies
            "formats": args.formats,
            "num_prompt_tokens": args.prompt_tokens,
            "num_steps": args.steps,
            "rounds": args.rounds,
        },
        "isa": isa,
        "peaks": {name: of_part.rates for name, of_part in peaks.items()},
        "kernels": [] if kernels is None else kernel_rows(kernels, peaks["kernels"]),
        "engines": {name: summarise_format(of_format, spec, peaks[name]) for name, of_format in measured.items()},
        "cores_of_others": cores_of_others,
    }


def _run_kernels(args: argparse.Namespace) -> list[Line]:
    lines = []
    for weight_format in args.formats:
        lines += _run_program(args, "bench_linear", "--filter", f"/{weight_format}/")
    # Quantised weights go with either type of cache.
    kv_formats = {"float32": ["float32"]}
    for kv_format in dict.fromkeys(kv for name in args.formats for kv in kv_formats.get(name, ["bfloat16", "int8"])):
        for case in (f"decode/{kv_format}/{args.heads}/", f"prompt/{kv_format}/{args.heads}/tokens512/"):
            lines += _run_program(args, "bench_attention", "--filter", case)
    return [line for line in lines if "median_us" in line]


def _run_program(args: argparse.Namespace, name: str, *arguments: str) -> list[Line]:
    """The JSON that a micro-benchmark prints. Raises RuntimeError if it fails."""
    if not (program := args.programs / name).is_file():
        raise RuntimeError(f"{name} is not built: `make micro-benchmarks` does it")
    done = subprocess.run([program, "--json", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed with {done.returncode}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _measure_format(args: argparse.Namespace, weight_format: str) -> dict[str, Any]:
    """Everything about whole steps in one format: "linear_weights" and "kv_format" of the engine, and what each of the
    parts asked for measured.
    """
    limit = open_checkpoint(str(args.model), None).spec.default_max_len - args.steps - NUM_SPARE_TOKENS
    contexts = sorted({min(context, limit) for context in args.contexts})
    start = partial(
        Steps,
        str(args.model),
        weight_format,
        batch=max(args.batches),
        num_prompt_tokens=args.prompt_tokens,
        context=max(contexts[-1] + args.steps + NUM_SPARE_TOKENS, args.prompt_tokens + MAX_OUTPUT_TOKENS),
    )
    with ExitStack() as stack:
        engine = stack.enter_context(closing(start(num_threads=args.threads)))
        measured = {name: engine.stats[name] for name in ("num_threads", "linear_weights")}
        measured["kv_format"] = engine.kv_format
        if "steps" in args.parts:
            engines = [engine]
            if measured["num_threads"] > 1:
                engines.append(stack.enter_context(closing(start(num_threads=1))))
            measured["runs"] = _run_steps(engines, args)
        if "contexts" in args.parts:
            measured["contexts"] = engine.by_context(contexts, args.steps, args.context_rounds)
        if "profile" in args.parts:
            profiled = stack.enter_context(closing(start(num_threads=args.threads, profile=True)))
            measured["profiles"] = [profiled.profile(batch, args.prompt_tokens, args.steps) for batch in args.batches]
    return measured


def _run_steps(engines: list[Steps], args: argparse.Namespace) -> list[Line]:
    """The engines take turns, A B A B, so that a machine that drifts drifts for both."""
    return [
        {"num_threads": engine.stats["num_threads"], **engine.decode(batch, args.prompt_tokens, args.steps)}
        for _ in range(args.rounds)
        for batch in args.batches
        for engine in engines
    ]


def summarise_format(measured: dict[str, Any], spec: Any, peaks: Peaks) -> dict[str, Any]:
    """What was measured, with the median steps beside the peaks instead of the runs; and how many times as fast all
    threads are as one, by batch: of each pair of runs, and their median.
    """
    runs = measured.get("runs", [])
    by_case: dict[tuple[int, int], list[Line]] = {}
    for run in runs:
        by_case.setdefault((run["batch"], run["num_threads"]), []).append(run)
    kv_format = measured["kv_format"]
    kv_bytes = _C.Engine.kv_bytes_per_token(spec.to_native(), kv_format)
    steps, scaling = [], {}
    for (batch, num_threads), own in by_case.items():
        context = own[0]["context"]
        seconds = median(second for run in own for second in run["seconds"])
        work = step_work(spec, measured["linear_weights"], kv_bytes, kv_format, batch, context)
        row = {"batch": batch, "num_threads": num_threads, "context": context, "seconds": seconds}
        steps.append({**row, "num_bytes": work.num_bytes, **work.shares(seconds, num_threads, peaks)})
        if num_threads > 1 and (batch, 1) in by_case:
            pairs = [
                median(one["seconds"]) / median(all_["seconds"])
                for one, all_ in zip(by_case[batch, 1], own, strict=True)
            ]
            scaling[batch] = {"pairs": pairs, "ratio": median(pairs)}
    rest = {key: value for key, value in measured.items() if key != "runs"}
    return {**rest, "steps": sorted(steps, key=lambda row: (row["batch"], row["num_threads"])), "scaling": scaling}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--formats", nargs="+", choices=ENGINE_SETTINGS, default=["bfloat16"], help="of the weights")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="what to measure; default: all")
    parser.add_argument("--batches", nargs="+", type=positive, default=list(BATCHES))
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="of each sequence of a batch; default 128")
    parser.add_argument("--steps", type=positive, default=16, help="decode steps of a run; default 16")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each batch; default 3")
    parser.add_argument("--contexts", nargs="+", type=positive, default=list(CONTEXTS), help="tokens in the cache")
    parser.add_argument("--context-rounds", type=positive, default=1, help="passes over the contexts; default 1")
    parser.add_argument("--heads", default="heads9:3x64", help="of attention, as bench_attention names them")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="where the micro-benchmarks are")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, help="write JSON to this file as well")
    args = parser.parse_args(argv)
    args.model = args.model or find_demo_model()
    return args


if __name__ == "__main__":
    sys.exit(main())
