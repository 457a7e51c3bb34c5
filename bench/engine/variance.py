"""Static against continuous batching as output lengths vary, for real: every policy on the same requests.

48 requests, offered at once to 16 slots: short random prompts, outputs exponential with mean 64, those above a cap
drawn again; one workload per cap. Each request asks for up to the cap (its max_tokens, for which `reserve` and `static`
hold blocks) and really ends where it was drawn. A model cannot be told where to end, so the client ends it: it aborts a
request once it has its last token, which takes effect before the next step is scheduled, as an end of the model's own
would. Stop tokens would not do: which tokens come is the model's choice, and to mask them until it is time changes it.

The KV cache holds every slot's longest possible sequence, or a half or a quarter of that. Slots, token budget, KV
bytes, weights and kernels are the same for all policies; so are, as a check, the tokens of every request. Each run has
a fresh engine, since `estimate` learns.

python bench/engine/variance.py            # about ten minutes; JSON and SVG into bench/results, tables to stdout
python bench/engine/variance.py --quick    # about one
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import CpuUse, disturbers, wait_until_quiet
from report import spread
from script import POLICIES, RESULTS, add_wait_quiet, describe_run, positive, say, write_json
from served import Served, SharedModel, serve_at_once
from variance_report import FIGURES, chart, format_tables
from worker import quantiles
from workload import MEAN_OUTPUT, SEED, TOKEN_IDS, Request

from steploop import SamplingParams
from steploop.demo.model import find_demo_model

CAPS = (16, 64, 256, 512)
KV_SHARES = (1.0, 0.5, 0.25)
PROMPT_LENGTHS = (16, 48)
BLOCK_SIZE = 16
QUICK = {"caps": [64, 256], "kv_shares": [1.0, 0.25], "num_requests": 24, "repeats": 1}

Run = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What one run is of."""

    cap: int
    kv_share: float
    policy: str


def make_workload(cap: int, num_requests: int, vocab_size: int = TOKEN_IDS[1]) -> list[Request]:
    """Outputs exponential, at least 1 token; those above the cap are drawn again. All caps have the same prompts, whose
    token ids wrap around in a smaller vocabulary.
    """
    prompts, outputs = random.Random(SEED), random.Random(SEED + 1)
    requests = []
    for _ in range(num_requests):
        prompt = [prompts.randrange(*TOKEN_IDS) % vocab_size for _ in range(prompts.randint(*PROMPT_LENGTHS))]
        while (drawn := 1 + int(outputs.expovariate(1 / MEAN_OUTPUT))) > cap:
            pass
        requests.append(Request(prompt, drawn))
    return requests


def num_kv_blocks(cap: int, kv_share: float, max_num_seqs: int) -> int:
    """A share of what a full batch of the longest sequences takes; at least one such sequence."""
    longest = -(-(PROMPT_LENGTHS[1] + cap) // BLOCK_SIZE)
    return max(longest, round(kv_share * max_num_seqs * longest))


def main(argv: list[str] | None = None) -> int:
    """Measures, prints tables, writes JSON and SVG, returns the exit code."""
    args = _parse(argv)
    path = args.model or find_demo_model()
    say("loading the model ...")
    model = SharedModel(path, args.dtype)
    runs = []
    for cap in args.caps:
        requests = make_workload(cap, args.num_requests, model.vocab_size)
        for kv_share in args.kv_shares:
            for repeat in range(args.repeats):
                wait_until_quiet({}, args.wait_quiet)
                for policy in POLICIES:  # in turns, so that a machine that drifts drifts for all of them
                    cell = Cell(cap, kv_share, policy)
                    run = {**vars(cell), "repeat": repeat, **measure(model, cell, requests, args)}
                    runs.append(run)
                    say(f"cap {cap}, KV {kv_share:g}, {policy}: {run['throughput']:.0f} output tokens/s")
    result = describe_run(
        path,
        args,
        isa=runs[0]["isa"],
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    ) | {
        "summary": summarise(runs),
        "outputs_equal": outputs_equal(runs),
        "runs": runs,
    }
    write_json(args.output, result)
    args.output.with_suffix(".svg").write_text(chart(result))
    print(format_tables(result))
    return 0


def measure(model: SharedModel, cell: Cell, requests: list[Request], args: argparse.Namespace) -> Run:
    """One run."""
    engine = model.engine(
        scheduling_policy=cell.policy,
        max_model_len=PROMPT_LENGTHS[1] + cell.cap,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_kv_blocks(cell.cap, cell.kv_share, args.max_num_seqs),
        num_threads=args.threads,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=cell.cap, ignore_eos=True, detokenize=False)
        prompts = [request.prompt_token_ids for request in requests]
        serve_at_once(engine, prompts[:1], [params], [1])  # a new engine's first step wakes threads and touches memory
        engine.reset_prefix_cache()
        use = CpuUse({})
        lengths = [request.num_output_tokens for request in requests]
        served = serve_at_once(engine, prompts, [params] * len(requests), lengths)
        cores = use.cores()
        run = figures_of(served, args.max_num_seqs)
        return run | {"isa": engine.stats()["isa"], "cores": cores, "quiet": not disturbers(cores, cell.policy)}
    finally:
        engine.close()


def figures_of(served: Served, max_num_seqs: int) -> dict[str, Any]:
    """A run's measures."""
    num_tokens = sum(len(ids) for ids in served.token_ids)
    return {
        "duration": served.duration,
        "num_output_tokens": num_tokens,
        "throughput": num_tokens / served.duration,
        **quantiles("ttft", served.first_token_times),
        **quantiles("latency", served.last_token_times),
        **quantiles("inter_token_latency", served.inter_token_latencies),
        "mean_occupancy": served.time_mean("num_scheduled_requests") / max_num_seqs,
        "mean_kv_use": served.time_mean("used_num_blocks") / served.iterations[0]["max_num_blocks"],
        "num_kv_blocks": served.iterations[0]["max_num_blocks"],
        "num_preemptions": served.total("num_preemptions"),
        "num_recomputed_tokens": served.total("num_recomputed_tokens"),
        "num_steps": len(served.iterations),
        "outputs": hashlib.sha256(repr(served.token_ids).encode()).hexdigest(),
    }


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """Per cell: figures as [median, min, max] over its quiet runs; over all of them where none was quiet."""
    cells: dict[Cell, list[Run]] = {}
    for run in runs:
        cells.setdefault(Cell(run["cap"], run["kv_share"], run["policy"]), []).append(run)
    summary = []
    for cell, all_runs in cells.items():
        quiet = [run for run in all_runs if run["quiet"]]
        figures = {key: spread([run[key] for run in quiet or all_runs]) for key in ("throughput", *FIGURES)}
        counts = {"num_runs": len(all_runs), "num_quiet_runs": len(quiet)}
        summary.append({**vars(cell), "num_kv_blocks": all_runs[0]["num_kv_blocks"], **counts, **figures})
    return summary


def outputs_equal(runs: list[Run]) -> bool:
    """Whether each cap's requests had the same tokens in all its runs."""
    return all(len({run["outputs"] for run in runs if run["cap"] == cap}) == 1 for cap in {run["cap"] for run in runs})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer caps, KV sizes and requests, once each")
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--caps", nargs="+", type=positive, default=list(CAPS))
    parser.add_argument("--kv-shares", nargs="+", type=float, default=list(KV_SHARES), help="default 1 0.5 0.25")
    parser.add_argument("--num-requests", type=positive, default=48)
    parser.add_argument("--max-num-seqs", type=positive, default=16)
    parser.add_argument("--max-num-batched-tokens", type=positive, default=512)
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each cell; default 3")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "variance.json", help="JSON; the SVG goes beside it")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    if any(not 0 < share <= 1 for share in args.kv_shares):
        parser.error(f"--kv-shares must be in (0, 1], got {args.kv_shares}")
    return args


if __name__ == "__main__":
    sys.exit(main())
