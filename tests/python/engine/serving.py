"""Requests through a native engine, and what each of them got."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steploop import _C


@dataclass
class Result:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_preemptions: int = 0

    def bits(self) -> tuple[object, ...]:
        """All that must not depend on the batch."""
        return (self.token_ids, np.array(self.logprobs, np.float32).tobytes(), self.finish_reason)


@dataclass
class Work:
    """A request to come: its tokens, its sampling parameters and the step before which it arrives."""

    token_ids: list[int]
    params: Any
    step: int = 0


def random_work(vocab_size: int, num_requests: int, *, longest: int, outputs: int, seed: int) -> dict[str, Work]:
    """Requests of mixed lengths and sampling, arriving over the first steps. Their results depend on them alone: each
    has its own seed, or is greedy."""
    rng = random.Random(seed)
    work = {}
    for index in range(num_requests):
        sampling: dict[str, Any] = {"temperature": 0.0}
        if index % 2:
            sampling = {
                "temperature": rng.uniform(0.3, 1.5),
                "top_p": rng.choice([1.0, 0.9]),
                "top_k": rng.choice([0, 50]),
            }
        params = _C.SamplingParams(
            max_tokens=rng.randint(3, outputs), ignore_eos=True, logprobs=0, seed=rng.getrandbits(60), **sampling
        )
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        work[str(index)] = Work(prompt, params, step=rng.randrange(12))
    return work


def run(engine: Any, work: dict[str, Work], *, shuffle_seed: int | None = None) -> dict[str, Result]:
    """Serves all of `work`, then checks that the engine holds nothing back."""
    if shuffle_seed is not None:
        engine.shuffle_free_blocks(shuffle_seed)
    results = {request_id: Result() for request_id in work}
    waiting, step = dict(work), 0
    while waiting or engine.has_unfinished_requests():
        for request_id in [request_id for request_id, one in waiting.items() if one.step <= step]:
            one = waiting.pop(request_id)
            engine.add_request(request_id, one.token_ids, one.params)
        for output in engine.step():
            result = results[output.request_id]
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs
            result.finish_reason = output.finish_reason
            result.num_preemptions = output.num_preemptions
        step += 1
    engine.check_integrity()
    assert engine.stats()["num_used_kv_blocks"] == 0
    return results


def make_engine(model: Any, **settings: Any) -> Any:
    """A native engine with room for everything unless told otherwise."""
    longest = min(1024, model.config.max_position_embeddings)
    defaults = {"max_model_len": longest, "num_kv_blocks": 4096, "kv_cache_dtype": model.dtype, "num_threads": 2}
    return _C.Engine(model, **{**defaults, **settings})
