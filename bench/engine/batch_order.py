"""What the order of a batch's lines is worth: the same job in each order of `steploop batch`, on one engine.

Lines that share 24 long beginnings, shuffled, with exponential output lengths that their max_tokens say; the KV cache
has no room for all beginnings beside what runs. Every run starts with an empty prefix cache.

duration    seconds from the first line to the last
computed    tokens of prompts that the prefix cache did not have
tail        seconds at the end, and before, in which fewer than half of the slots were in use

python bench/engine/batch_order.py    # about five minutes; JSON into bench/results, a summary to stdout
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import QUIET_CORES, CpuUse, disturbers, wait_until_quiet
from report import spread
from script import RESULTS, add_wait_quiet, describe_run, positive, say, write_json
from workload import SEED, TOKEN_IDS

from steploop import LLMEngine
from steploop.batch.order import ORDERS
from steploop.batch.run import ModelNames, open_job
from steploop.batch.runner import BatchRun
from steploop.demo.model import find_demo_model
from steploop.openai.model import ServedModel

NUM_LINES, NUM_PREFIXES, PREFIX, TAILS = 144, 24, 384, (8, 24)
MEAN_OUTPUT, MIN_OUTPUT, MAX_OUTPUT = 32, 4, 160
BLOCK_SIZE = 16

Run = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a summary, writes JSON, returns the exit code."""
    args = _parse(argv)
    path = args.model or find_demo_model()
    longest = args.prefix + TAILS[1] + MAX_OUTPUT
    say("loading the model ...")
    engine = LLMEngine(
        model=path,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.threads,
        max_num_seqs=args.slots,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        num_kv_blocks=args.slots * -(-longest // BLOCK_SIZE),
    )
    runs: list[Run] = []
    with engine, tempfile.TemporaryDirectory() as folder:
        source = _write_lines(Path(folder) / "in.jsonl", args, engine.vocab_size)
        for repeat in range(args.repeats):
            for order in ORDERS if repeat % 2 == 0 else reversed(ORDERS):  # a machine that drifts drifts for all
                wait_until_quiet({}, args.wait_quiet)
                use = CpuUse({})
                figures = measure(engine, source, order)
                cores = use.cores()
                runs.append(
                    {"order": order, "repeat": repeat, **figures, "cores": cores, "quiet": not disturbers(cores, "")}
                )
                say(f"{order}: {figures['duration']:.2f} s")
    result = describe_run(
        path,
        args,
        quantization=args.quantization,
        slots=args.slots,
        num_prefixes=args.num_prefixes,
        prefix_tokens=args.prefix,
        mean_output=MEAN_OUTPUT,
        max_output=MAX_OUTPUT,
        kv_cache_tokens=engine.config.num_kv_blocks * BLOCK_SIZE,
    ) | {
        "orders": summarise(runs),
        "answers_equal": all(run["answers"] == runs[0]["answers"] for run in runs),
        "runs": [{key: value for key, value in run.items() if key != "answers"} for run in runs],
    }
    write_json(args.output, result)
    print(format_report(result))
    return 0


def measure(engine: LLMEngine, source: Path, order: str) -> Run:
    """Works through the lines of `source` in that order."""
    output = source.with_name("out.jsonl")
    output.unlink(missing_ok=True)
    engine.reset_prefix_cache()
    engine.iteration_stats()
    names = ModelNames.of(engine.config, "model")
    with open_job(source, output, None, config=engine.config, names=names, seed=0) as job:
        summary = BatchRun(job, ServedModel(engine, names.name, 1), names.given, order).run()
    if summary.num_errors:
        raise RuntimeError(f"{summary.num_errors} lines failed")
    iterations = engine.iteration_stats()
    half = engine.config.max_num_seqs / 2
    return {
        "duration": summary.duration,
        "tokens_per_second": summary.num_output_tokens / summary.duration,
        "computed_prompt_tokens": sum(iteration["num_context_tokens"] for iteration in iterations),
        "num_prompt_tokens": summary.num_prompt_tokens,
        "num_steps": len(iterations),
        "tail_s": sum(
            iteration["iteration_latency_ms"] for iteration in iterations if iteration["num_scheduled_requests"] < half
        )
        / 1e3,
        "answers": sorted(
            (record["custom_id"], record["response"]["body"]["choices"][0]["text"])
            for record in map(json.loads, output.read_text().splitlines())
        ),
    }


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Of each order the figures as [median, min, max] over quiet runs, and its duration as a share of that of "input",
    round by round."""
    summary: dict[str, Any] = {}
    for order in ORDERS:
        own = [run for run in runs if run["order"] == order]
        counted = [run for run in own if run["quiet"]] or own
        keys = ("duration", "tokens_per_second", "computed_prompt_tokens", "num_steps", "tail_s")
        summary[order] = {key: spread([run[key] for run in counted]) for key in keys}
        base = {run["repeat"]: run["duration"] for run in runs if run["order"] == "input"}
        summary[order]["of_input"] = spread([run["duration"] / base[run["repeat"]] for run in own])
    return summary


def format_report(result: dict[str, Any]) -> str:
    """What a person reads."""
    machine, settings, runs = result["machine"], result["settings"], result["runs"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {settings['model']}, "
        f"{settings['quantization'] or settings['dtype']}; median [min-max]",
        f"{settings['num_requests']} lines over {settings['num_prefixes']} beginnings of {settings['prefix_tokens']} "
        f"tokens, {settings['slots']} slots, KV cache of {settings['kv_cache_tokens']} tokens",
        "",
        f"{'order':10}{'seconds':>22}{'of input':>20}{'prompt tokens computed':>24}{'steps':>8}{'half empty, s':>16}",
    ]
    for order, own in result["orders"].items():
        lines.append(
            f"{order:10}{_cell(own['duration'], '.1f'):>22}{_cell(own['of_input'], '.2f'):>20}"
            f"{own['computed_prompt_tokens'][0]:>24.0f}{own['num_steps'][0]:>8.0f}{own['tail_s'][0]:>16.1f}"
        )
    num_quiet = sum(run["quiet"] for run in runs)
    lines += [
        "",
        f"answers: {'the same in every order' if result['answers_equal'] else 'NOT the same'}",
        f"{num_quiet} of {len(runs)} runs were quiet (others below {QUIET_CORES} cores); only those count where any.",
    ]
    return "\n".join(lines)


def _write_lines(path: Path, args: argparse.Namespace, vocab_size: int) -> Path:
    generator = random.Random(SEED)

    def draw(count: int) -> list[int]:
        return [generator.randrange(*TOKEN_IDS) % vocab_size for _ in range(count)]

    prefixes = [draw(args.prefix) for _ in range(args.num_prefixes)]
    with path.open("w") as file:
        for number in range(args.num_requests):
            length = min(MAX_OUTPUT, max(MIN_OUTPUT, round(generator.expovariate(1 / MEAN_OUTPUT))))
            body = {
                "prompt": generator.choice(prefixes) + draw(generator.randint(*TAILS)),
                "max_tokens": length,
                "ignore_eos": True,
                "temperature": 0,
            }
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def _cell(figure: list[float], show: str) -> str:
    middle, low, high = (format(value, show) for value in figure)
    return f"{middle} [{low}-{high}]"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="default: none")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--slots", type=positive, default=16, help="default 16")
    parser.add_argument("--num-requests", type=positive, default=NUM_LINES, help=f"lines; default {NUM_LINES}")
    parser.add_argument("--num-prefixes", type=positive, default=NUM_PREFIXES, help=f"default {NUM_PREFIXES}")
    parser.add_argument("--prefix", type=positive, default=PREFIX, help=f"shared tokens; default {PREFIX}")
    parser.add_argument("--repeats", type=positive, default=3, help="runs in each order; default 3")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "batch_order.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
