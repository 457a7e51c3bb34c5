"""Runs transformers on the shapes and requests that end_to_end.py runs: generate, and its paged continuous batching.

python bench/gpu/peers.py llama_3_8b
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from shapes import PLANS, Plan
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = 0


def main() -> None:
    """Measures what works of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=PLANS)
    plan = PLANS[parser.parse_args().model]
    model = load(plan)
    for batch in plan.batches:
        attempt(f"decode, batch {batch}", lambda batch=batch: time_decode(plan, model, batch))
    attempt("continuous batching", lambda: time_continuous(plan, model))
    attempt("static batches", lambda: time_static(plan, model))


def load(plan: Plan) -> LlamaForCausalLM:
    """The model, its weights drawn on the device."""
    shape = dict(plan.config)
    config = LlamaConfig(
        num_hidden_layers=shape.pop("num_layers"),
        num_attention_heads=shape.pop("num_heads"),
        num_key_value_heads=shape.pop("num_kv_heads"),
        rope_parameters={"rope_type": "default", "rope_theta": shape.pop("rope_theta")},
        **shape,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    started = time.monotonic()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    synchronize()
    attention = model.config._attn_implementation
    report({"name": "load", "engine": "transformers", "attention": attention, "seconds": time.monotonic() - started})
    return model


def time_decode(plan: Plan, model: LlamaForCausalLM, batch: int) -> dict[str, Any]:
    """A decode step, as the difference between two calls that differ in their number of tokens."""
    prompts = torch.randint(0, plan.config["vocab_size"], (batch, plan.prompt_tokens), device=DEVICE)
    seconds = []
    for num_tokens in (2, 2, 2 + plan.num_steps):  # once to warm up
        started = time.perf_counter()
        generate(model, prompts, torch.ones_like(prompts), num_tokens)
        seconds.append(time.perf_counter() - started)
    step = (seconds[2] - seconds[1]) / plan.num_steps
    return about(plan, "decode") | {"batch": batch, "median_us": round(step * 1e6, 1)}


def time_static(plan: Plan, model: LlamaForCausalLM) -> dict[str, Any]:
    """Batches of equally many requests, padded, each as long as its longest output."""
    requests = plan.requests()
    started = time.perf_counter()
    for first in range(0, len(requests), plan.num_slots):
        batch = requests[first : first + plan.num_slots]
        longest = max(len(request.prompt_token_ids) for request in batch)
        padded = [[PADDING] * (longest - len(r.prompt_token_ids)) + r.prompt_token_ids for r in batch]
        mask = [[0] * (longest - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in batch]
        generate(
            model,
            torch.tensor(padded, device=DEVICE),
            torch.tensor(mask, device=DEVICE),
            max(request.num_output_tokens for request in batch),
        )
    return workload_result(plan, "static", time.perf_counter() - started)


def time_continuous(plan: Plan, model: LlamaForCausalLM) -> dict[str, Any]:
    """The same requests, each with its own number of tokens, through the paged cache. Not timed: its warm-up."""
    requests = plan.requests()
    manager = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=plan.max_output, eos_token_id=-1),
        **continuous_settings(plan),
    )
    num_tokens = 0
    with manager as running:
        started = time.perf_counter()
        for index, request in enumerate(requests):
            running.add_request(
                request.prompt_token_ids, request_id=str(index), max_new_tokens=request.num_output_tokens
            )
        num_finished = 0
        while num_finished < len(requests):
            result = running.get_result(timeout=1)
            if result is None:
                if not running.is_running():
                    raise RuntimeError("its thread ended")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                num_finished += 1
                num_tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - started
    expected = sum(request.num_output_tokens for request in requests)
    if num_tokens != expected:
        raise RuntimeError(f"it generated {num_tokens} tokens, not {expected}")
    return workload_result(plan, "continuous", seconds)


def continuous_settings(plan: Plan) -> dict[str, Any]:
    """As many sequences at once as the others run, where this version can be told."""
    try:
        from transformers import ContinuousBatchingConfig
    except ImportError:
        return {}
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    wanted = {"max_requests_per_batch": plan.num_slots, "max_batch_tokens": 2048, "allow_block_sharing": False}
    config = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in names})
    return {"continuous_batching_config": config}


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> None:
    """Greedy, exactly so many tokens each."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=PADDING, eos_token_id=None
    )
    out = model.generate(prompts, attention_mask=mask, generation_config=config)
    synchronize()
    if out.shape[1] != prompts.shape[1] + num_tokens:
        raise RuntimeError(f"it generated {out.shape[1] - prompts.shape[1]} tokens, not {num_tokens}")


def workload_result(plan: Plan, policy: str, seconds: float) -> dict[str, Any]:
    """Only tokens that were asked for count."""
    num_tokens = sum(request.num_output_tokens for request in plan.requests())
    return about(plan, "workload") | {
        "policy": policy,
        "num_requests": plan.num_requests,
        "num_slots": plan.num_slots,
        "num_output_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds, 1),
    }


def about(plan: Plan, name: str) -> dict[str, Any]:
    """What every result says."""
    return {"name": name, "engine": "transformers", "model": plan.name}


def attempt(what: str, measure: Callable[[], dict[str, Any]]) -> None:
    """A version in which one thing does not work may still do the others."""
    try:
        report(measure())
    except Exception as error:
        traceback.print_exc()
        report({"name": "not measured", "engine": "transformers", "what": what, "reason": str(error)[:500]})


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def report(line: dict[str, Any]) -> None:
    """One result, at once, so that it is there whatever comes next."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
