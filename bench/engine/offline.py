"""Offline throughput of steploop: 64 requests offered at once, and one alone. bench/peers compares it with others.

python bench/engine/offline.py                   # the demo model
python bench/engine/offline.py --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engines import EngineProcess
from machine import CpuUse, describe_machine, wait_until_quiet
from report import format_report, summarise
from script import POLICIES, add_wait_quiet, positive, say, write_json
from workload import MAX_OUTPUT, NUM_REQUESTS, TOKEN_IDS, WORKLOADS, make_workload


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table or JSON, returns the exit code."""
    args = _parse(argv)
    workloads: dict[str, dict[str, Any]] = {
        name: {"name": name, "num_requests": args.num_requests, "max_output": args.max_output}
        for name in args.workloads
    }
    settings = {
        "model": str(args.model or _demo_model()),
        "dtype": args.dtype,
        "num_threads": args.threads,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "kv_cache_memory_bytes": int(args.kv_cache_gib * 2**30),
        "max_model_len": max(_longest(workload) for workload in workloads.values()),
        "policy": args.policy,
    }
    try:
        say("loading steploop ...")
        engine = EngineProcess("steploop", sys.executable, settings, {})
    except RuntimeError as error:
        say(str(error))
        return 1
    try:
        for workload in workloads.values():
            workload["vocab_size"] = min(TOKEN_IDS[1], engine.about["vocab_size"])
        runs = _measure(engine, workloads, args.repeats, args.wait_quiet)
    except RuntimeError as error:
        say(str(error))
        return 1
    finally:
        engine.close()
    result = {
        "machine": describe_machine(),
        # A name, not where it lies.
        "settings": settings | {"model": Path(settings["model"]).name, "workloads": workloads},
        "engine": engine.about,
        "summary": summarise(runs),
        "runs": [{key: value for key, value in run.items() if key != "first_token_ids"} for run in runs],
    }
    if args.output:
        write_json(args.output, result)
    print(json.dumps(result) if args.json else format_report(result))
    return 0


def _measure(
    engine: EngineProcess, workloads: dict[str, dict[str, Any]], repeats: int, wait_quiet: float
) -> list[dict[str, Any]]:
    sessions = {engine.name: engine.session}
    say("warming up ...")
    for workload in workloads.values():
        engine.run(workload | {"max_output": min(8, workload["max_output"])})
    runs = []
    for repeat in range(repeats):
        for name, workload in workloads.items():
            wait_until_quiet(sessions, wait_quiet)
            use = CpuUse(sessions)
            run = engine.run(workload)
            runs.append({"engine": engine.name, "workload": name, "repeat": repeat, **run, "cores": use.cores()})
            say(f"{name}: {run['throughput']:.1f} output tokens/s")
    return runs


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each workload; default 3")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--max-num-seqs", type=positive, default=64)
    parser.add_argument("--max-num-batched-tokens", type=positive, default=2048)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="default 1")
    parser.add_argument("--policy", choices=POLICIES, default="on_demand")
    parser.add_argument("--num-requests", type=positive, default=NUM_REQUESTS, help="only the first so many")
    parser.add_argument("--max-output", type=positive, default=MAX_OUTPUT, help="cut outputs to so many tokens")
    add_wait_quiet(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="write JSON to this file as well")
    args = parser.parse_args(argv)
    if args.num_requests > NUM_REQUESTS:
        parser.error(f"--num-requests must be at most {NUM_REQUESTS}, got {args.num_requests}")
    return args


def _longest(workload: dict[str, Any]) -> int:
    """Tokens of the workload's longest sequence, rounded up to whole KV blocks."""
    lengths = [len(request.prompt_token_ids) + request.num_output_tokens for request in make_workload(**workload)]
    return -(-max(lengths) // 16) * 16


def _demo_model() -> Path:
    from steploop.demo.model import find_demo_model

    return find_demo_model()


if __name__ == "__main__":
    sys.exit(main())
