"""Runs the engine on the device with random weights and prints its times, a line of JSON each.

python bench/gpu/end_to_end.py llama_3_8b
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shapes import PLANS, Plan, read_weight_bytes

import steploop.ops  # noqa: F401  (makes torch know the operators)
from steploop import _C

BLOCK_SIZE = 16
PHASES = ("schedule_us", "build_us", "forward_us", "sample_us", "update_us")


def main() -> None:
    """Measures everything of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=PLANS)
    plan = PLANS[parser.parse_args().model]
    model = load(plan)
    for batch_invariant in (True, False):
        with Server(plan, model, batch_invariant, num_slots=max(plan.batches)) as server:
            for batch in plan.batches:
                report(server.time_decode(batch))
        for policy in ("on_demand", "static"):
            with Server(plan, model, batch_invariant, num_slots=plan.num_slots, policy=policy) as server:
                report(server.time_workload())


def load(plan: Plan) -> _C.Model:
    """The model, its weights drawn on the device."""
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # an emulated device's memory is the host's
    torch.manual_seed(0)
    model = _C.Model(_C.ModelConfig(**plan.config), dtype="bfloat16", device="cuda")
    for name, size in model.expected_weights().items():
        if name.endswith("norm.weight"):
            weight = torch.ones(size, dtype=torch.bfloat16, device=device)
        else:
            weight = torch.randn(size, dtype=torch.bfloat16, device=device) * 0.02
        if device == "cuda":
            torch.cuda.synchronize()
        model.load_weight(name, weight)
    model.finish_loading()
    del weight
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine takes its memory beside torch
    read_bytes = read_weight_bytes(plan.config, model.weight_bytes)
    seconds = round(time.monotonic() - started, 2)
    report({"name": "load", "weight_bytes": model.weight_bytes, "read_weight_bytes": read_bytes, "seconds": seconds})
    return model


def matmul_address() -> int:
    """Of torch's product: cuBLAS, on a device."""
    if torch.cuda.is_available():
        return int(torch.ops.steploop_cuda.matmul_address())
    library = Path(os.environ["STEPLOOP_CUDA_LIBRARY"]).with_name("libsteploop_emulated_ops.so")
    torch.ops.load_library(str(library))
    return int(torch.ops.steploop_emulated.matmul_address())


class Server:
    """An engine and how to step it."""

    def __init__(
        self, plan: Plan, model: _C.Model, batch_invariant: bool, *, num_slots: int, policy: str = "on_demand"
    ) -> None:
        self._plan = plan
        self._batch_invariant = batch_invariant
        self._policy = policy
        self._num_slots = num_slots
        max_model_len = plan.prompt_tokens + self._max_decode_tokens(num_slots)
        max_model_len = max(max_model_len, plan.max_prompt + plan.max_output)
        other = {} if batch_invariant else {"matmul": matmul_address()}
        self._engine = _C.Engine(
            model,
            max_model_len=max_model_len,
            max_num_seqs=num_slots,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_slots * -(-max_model_len // BLOCK_SIZE),
            kv_cache_dtype="bfloat16",
            scheduling_policy=policy,
            enable_prefix_caching=False,  # the same prompts are served again and again
            **other,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def time_decode(self, batch: int) -> dict[str, Any]:
        """Steps in which each of `batch` sequences gets a token. Step by step, as a caller sees them."""
        plan, engine = self._plan, self._engine
        params = self._params(self._max_decode_tokens(batch))
        for index in range(batch):
            prompt = torch.randint(0, plan.config["vocab_size"], (plan.prompt_tokens,)).tolist()
            engine.add_request(str(index), prompt, params)
        durations: list[float] = []
        phases: list[dict[str, float]] = []
        with self._stepping():
            while len(durations) < plan.num_warm_up_steps + plan.num_steps:
                if engine.num_unfinished_requests() < batch:
                    raise RuntimeError(f"a sequence ended while decode steps of {batch} were timed")
                started = time.perf_counter()
                engine.step()
                duration = time.perf_counter() - started
                last = engine.stats()["last_step"]
                if last["num_decode_tokens"] == batch and last["num_prompt_tokens"] == 0:
                    durations.append(duration * 1e6)
                    phases.append({name: last[name] for name in PHASES})
            for index in range(batch):
                engine.abort_request(str(index))
            while engine.has_unfinished_requests():
                engine.step()
        timed = durations[plan.num_warm_up_steps :]
        return self._about("decode") | {
            "batch": batch,
            "context": plan.prompt_tokens + plan.num_warm_up_steps + plan.num_steps // 2,
            "median_us": round(statistics.median(timed), 1),
            "min_us": round(min(timed), 1),
            "max_us": round(max(timed), 1),
            "phases_us": {
                name: round(statistics.median(step[name] for step in phases[plan.num_warm_up_steps :]), 1)
                for name in PHASES
            },
        }

    def time_workload(self) -> dict[str, Any]:
        """All requests offered at once; exactly as many tokens as each asks for."""
        engine, requests = self._engine, self._plan.requests()
        self._warm_up()
        num_tokens = num_steps = num_busy = 0
        with self._stepping():
            started = time.perf_counter()
            for index, request in enumerate(requests):
                engine.add_request(str(index), request.prompt_token_ids, self._params(request.num_output_tokens))
            while engine.has_unfinished_requests():
                num_tokens += sum(len(output.token_ids) for output in engine.step())
                num_steps += 1
                num_busy += engine.stats()["last_step"]["num_sequences"]
            seconds = time.perf_counter() - started
        expected = sum(request.num_output_tokens for request in requests)
        if num_tokens != expected:
            raise RuntimeError(f"the engine generated {num_tokens} tokens, not {expected}")
        return self._about("workload") | {
            "policy": "continuous" if self._policy == "on_demand" else self._policy,
            "num_requests": len(requests),
            "num_slots": self._num_slots,
            "num_output_tokens": num_tokens,
            "num_steps": num_steps,
            "mean_occupancy": round(num_busy / num_steps / self._num_slots, 3),
            "seconds": round(seconds, 3),
            "tokens_per_s": round(num_tokens / seconds, 1),
        }

    def _warm_up(self) -> None:
        with self._stepping():
            for index in range(self._num_slots):
                self._engine.add_request(f"warm-up {index}", [1, 2, 3], self._params(3))
            while self._engine.has_unfinished_requests():
                self._engine.step()

    def _about(self, name: str) -> dict[str, Any]:
        return {"name": name, "engine": "steploop", "model": self._plan.name, "batch_invariant": self._batch_invariant}

    def _max_decode_tokens(self, batch: int) -> int:
        """Enough for every sequence to be there while steps are timed: the first starts while others wait for it."""
        plan = self._plan
        return plan.num_warm_up_steps + plan.num_steps + batch * plan.prompt_tokens // 2048 + 16

    def _params(self, num_tokens: int) -> _C.SamplingParams:
        return _C.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Where steps run: products of another library must come in order with the engine's own work."""
        if self._batch_invariant or not torch.cuda.is_available():
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(self._engine.cuda_stream())):
                yield


def report(line: dict[str, Any]) -> None:
    """One result, at once, so that it is there whatever comes next."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
