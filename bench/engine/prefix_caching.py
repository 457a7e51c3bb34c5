"""What prefix caching saves and what it costs, on the real engine.

shared    64 requests whose prompts begin with the same 512 tokens and end in tails of their own, with the cache and
          without: seconds until all have their first tokens, and those of the steps that computed prompts
samples   n=8 samples of one 512-token prompt against 8 requests of it that share nothing: KV blocks at the peak
overhead  64 requests that share nothing, with the cache and without, in turns: what a step takes beside the model, as
          a share of a step. The KV cache is full of other prompts, so that every block taken forgets a cached one.

python bench/engine/prefix_caching.py    # about three minutes; JSON into bench/results, a summary to stdout
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from machine import CpuUse, disturbers, wait_until_quiet
from prefix_report import format_report, summarise_overhead, summarise_shared
from script import RESULTS, add_wait_quiet, describe_run, positive, say, write_json
from served import Served, SharedModel, serve_at_once
from workload import NUM_REQUESTS, SEED, TOKEN_IDS, make_workload

from steploop import LLMEngine, SamplingParams
from steploop.demo.model import find_demo_model

PREFIX, TAILS, NUM_SHARED_OUTPUT = 512, (8, 24), 8
NUM_SAMPLES, NUM_SAMPLE_OUTPUT = 8, 32
OVERHEAD_SLOTS, OVERHEAD_OUTPUT = 16, 64
BLOCK_SIZE = 16
FILL_BLOCKS = 2  # KV blocks of a prompt that fills the cache

Run = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a summary, writes JSON, returns the exit code."""
    args = _parse(argv)
    path = args.model or find_demo_model()
    say("loading the model ...")
    model = SharedModel(path, args.dtype)
    runs: list[Run] = []
    for part, measure in (("shared", measure_shared), ("overhead", measure_overhead)):
        for repeat in range(args.repeats):
            for caching in (True, False):  # in turns, so that a machine that drifts drifts for both
                wait_until_quiet({}, args.wait_quiet)
                use = CpuUse({})
                figures = measure(model, caching, args)
                cores = use.cores()
                run = {"part": part, "caching": caching, "repeat": repeat}
                runs.append({**run, **figures, "cores": cores, "quiet": not disturbers(cores, "")})
                say(f"{part}, caching {'on' if caching else 'off'}: {figures['duration']:.2f} s")
    result = describe_run(path, args, prefix_tokens=args.prefix) | {
        "shared": summarise_shared([run for run in runs if run["part"] == "shared"]),
        "samples": measure_samples(model, args),
        "overhead": summarise_overhead([run for run in runs if run["part"] == "overhead"]),
        "runs": [{key: value for key, value in run.items() if key != "answers"} for run in runs],
    }
    write_json(args.output, result)
    print(format_report(result))
    return 0


def measure_shared(model: SharedModel, caching: bool, args: argparse.Namespace) -> Run:
    """Prompts that begin alike, in an engine that has seen none of them. "answers": tokens and log-probabilities."""
    generator = random.Random(SEED)
    prefix = _random_tokens(generator, args.prefix, model)
    prompts = [prefix + _random_tokens(generator, generator.randint(*TAILS), model) for _ in range(args.num_requests)]
    params = SamplingParams(temperature=0, max_tokens=NUM_SHARED_OUTPUT, ignore_eos=True, detokenize=False, logprobs=1)
    longest = args.prefix + TAILS[1] + NUM_SHARED_OUTPUT
    engine = _engine(model, args, longest=longest, max_num_seqs=args.num_requests, enable_prefix_caching=caching)
    try:
        _warm_up(engine)
        served = serve_at_once(engine, prompts, [params] * len(prompts))
    finally:
        engine.close()
    return _figures(served) | {
        "num_prompt_tokens": sum(map(len, prompts)),
        "first_tokens_s": max(served.first_token_times),
        "prompt_steps_s": sum(
            iteration["iteration_latency_ms"] / 1e3
            for iteration in served.iterations
            if iteration["num_context_requests"]
        ),
        "answers": [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in served.outputs],
    }


def measure_samples(model: SharedModel, args: argparse.Namespace) -> dict[str, Any]:
    """KV blocks at the peak: of one request as users have it, and of as many requests that share nothing."""
    prompt = _random_tokens(random.Random(SEED), args.prefix, model)
    peaks = {}
    for name, num_prompts, n, caching in (
        ("one_request", 1, NUM_SAMPLES, True),
        ("requests_alone", NUM_SAMPLES, 1, False),
    ):
        params = SamplingParams(n=n, seed=1, max_tokens=NUM_SAMPLE_OUTPUT, ignore_eos=True, detokenize=False)
        longest = args.prefix + NUM_SAMPLE_OUTPUT
        engine = _engine(model, args, longest=longest, max_num_seqs=NUM_SAMPLES, enable_prefix_caching=caching)
        try:
            served = serve_at_once(engine, [prompt] * num_prompts, [params] * num_prompts)
        finally:
            engine.close()
        if sum(len(output.outputs) for output in served.outputs) != NUM_SAMPLES:
            raise RuntimeError(f"{name} did not bring {NUM_SAMPLES} samples")
        peaks[name] = max(iteration["used_num_blocks"] for iteration in served.iterations)
    return {
        "num_samples": NUM_SAMPLES,
        "prompt_blocks": -(-args.prefix // BLOCK_SIZE),
        "peak_blocks": peaks["one_request"],
        "peak_blocks_of_requests": peaks["requests_alone"],
    }


def measure_overhead(model: SharedModel, caching: bool, args: argparse.Namespace) -> Run:
    """Random requests in an engine whose KV cache is full of what others have left behind."""
    requests = make_workload(
        "mixed", num_requests=args.num_requests, max_output=OVERHEAD_OUTPUT, vocab_size=model.vocab_size
    )
    longest = max(len(request.prompt_token_ids) + request.num_output_tokens for request in requests)
    engine = _engine(model, args, longest=longest, max_num_seqs=OVERHEAD_SLOTS, enable_prefix_caching=caching)
    try:
        _fill(engine, model)
        served = serve_at_once(
            engine,
            [request.prompt_token_ids for request in requests],
            [
                SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False)
                for request in requests
            ],
        )
    finally:
        engine.close()
    num_steps = len(served.iterations)
    return _figures(served) | {
        "num_steps": num_steps,
        "cached_blocks_before": served.iterations[0]["cached_num_blocks"],
        "step_ms": served.total("iteration_latency_ms") / num_steps,
        "schedule_us": served.total("schedule_us") / num_steps,
        "update_us": served.total("update_us") / num_steps,
        # All but the model's part: requests are taken in, prompts are hashed, scheduled, updated.
        "beside_model_us": (
            served.total("iteration_latency_ms") * 1e3
            - sum(served.total(phase) for phase in ("build_us", "forward_us", "sample_us"))
        )
        / num_steps,
        "answers": served.token_ids,
    }


def _engine(
    model: SharedModel, args: argparse.Namespace, *, longest: int, max_num_seqs: int, enable_prefix_caching: bool
) -> LLMEngine:
    """With KV blocks for as many sequences of `longest` tokens as may run."""
    num_blocks = -(-longest // BLOCK_SIZE)
    return model.engine(
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max_num_seqs * num_blocks,
        num_threads=args.threads,
        enable_prefix_caching=enable_prefix_caching,
    )


def _warm_up(engine: LLMEngine) -> None:
    """A new engine's first step wakes threads and touches memory."""
    serve_at_once(engine, [[TOKEN_IDS[0]] * 8], [SamplingParams(max_tokens=1, detokenize=False)])
    engine.reset_prefix_cache()


def _fill(engine: LLMEngine, model: SharedModel) -> None:
    """Serves other random prompts until a cache is full of them."""
    generator = random.Random(SEED + 1)
    num_blocks = engine.stats()["num_kv_blocks"]
    prompts = [_random_tokens(generator, FILL_BLOCKS * BLOCK_SIZE, model) for _ in range(-(-num_blocks // FILL_BLOCKS))]
    serve_at_once(engine, prompts, [SamplingParams(max_tokens=1, detokenize=False)] * len(prompts))


def _figures(served: Served) -> dict[str, Any]:
    return {
        "duration": served.duration,
        "hit_tokens": served.total("reused_tokens"),
        "queried_tokens": served.total("queried_tokens"),
        "context_tokens": served.total("num_context_tokens"),
    }


def _random_tokens(generator: random.Random, count: int, model: SharedModel) -> list[int]:
    return [generator.randrange(*TOKEN_IDS) % model.vocab_size for _ in range(count)]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=positive, help="default: what the engine chooses by itself")
    parser.add_argument("--num-requests", type=positive, default=NUM_REQUESTS, help="default, and at most, 64")
    parser.add_argument("--prefix", type=positive, default=PREFIX, help=f"shared tokens; default {PREFIX}")
    parser.add_argument("--repeats", type=positive, default=3, help="runs each way; default 3")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "prefix_caching.json")
    args = parser.parse_args(argv)
    if args.num_requests > NUM_REQUESTS:
        parser.error(f"--num-requests must be at most {NUM_REQUESTS}, got {args.num_requests}")
    return args


if __name__ == "__main__":
    sys.exit(main())
