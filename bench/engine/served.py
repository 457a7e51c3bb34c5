"""Engines in this process that share one copy of a model's weights, and what happens to requests they serve."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from steploop import LLMEngine, RequestOutput, SamplingParams
from steploop.weights import load_model, open_checkpoint, resolve_dtype

_DRAIN_EVERY = 256  # steps; the engine remembers more


class SharedModel:
    """A model that is read once, for any number of engines. They do without its tokenizer."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._settings = {"model": model, "dtype": dtype}
        self._checkpoint = dataclasses.replace(open_checkpoint(model), tokenizer=None)
        self._weights = load_model(self._checkpoint, resolve_dtype(dtype, self._checkpoint))
        self.vocab_size = self._checkpoint.spec.vocab_size

    def engine(self, **settings: Any) -> LLMEngine:
        """A fresh engine, KV cache and all; takes milliseconds."""
        with mock.patch.multiple(
            "steploop.engine",
            open_checkpoint=lambda *_: self._checkpoint,
            load_model=lambda *_: self._weights,
        ):
            return LLMEngine(**self._settings, **settings)


@dataclass
class Served:
    """What happened to requests that were all offered at once. Times are seconds since then."""

    outputs: list[RequestOutput] = field(default_factory=list)
    """The last of each."""
    first_token_times: list[float] = field(default_factory=list)
    last_token_times: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    """Between any two tokens of a request that follow each other."""
    iterations: list[dict[str, Any]] = field(default_factory=list)
    """LLMEngine.iteration_stats() of every step."""

    @property
    def duration(self) -> float:
        """Until the last token of all."""
        return max(self.last_token_times)

    @property
    def token_ids(self) -> list[list[int]]:
        """What each request generated; of several samples, the first."""
        return [output.outputs[0].token_ids for output in self.outputs]

    def total(self, name: str) -> float:
        """Sum of a figure over all iterations."""
        return sum(iteration[name] for iteration in self.iterations)

    def time_mean(self, name: str) -> float:
        """Mean of a figure over time: each iteration counts for as long as it took."""
        weighted = sum(iteration[name] * iteration["iteration_latency_ms"] for iteration in self.iterations)
        return weighted / self.total("iteration_latency_ms")


def serve_at_once(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    num_output_tokens: Sequence[int] | None = None,
) -> Served:
    """Steps the engine until every request has ended.

    Args:
        engine: With nothing in flight.
        prompts: Token ids.
        params: One for each prompt.
        num_output_tokens: Where each request ends, if that is before its max_tokens: after the step that brought its
            last token it is aborted, which the engine does before it schedules the next step. So slot and blocks are
            free when they are after an end of the engine's own finding; but no step before that knows.
    """
    served = Served()
    engine.iteration_stats()
    last: dict[str, RequestOutput] = {}
    started = time.monotonic()
    for index, (prompt, of_request) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, of_request, arrival_time=started)
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            before, last[output.request_id] = last.get(output.request_id), output
            num_tokens = len(output.outputs[0].token_ids)
            if before and num_tokens > len(before.outputs[0].token_ids):
                served.inter_token_latencies.append(output.metrics.last_token_time - before.metrics.last_token_time)
            if num_output_tokens and not output.finished and num_tokens == num_output_tokens[int(output.request_id)]:
                engine.abort_request(output.request_id)
        num_steps += 1
        if num_steps % _DRAIN_EVERY == 0:
            served.iterations += engine.iteration_stats()
    served.iterations += engine.iteration_stats()
    served.outputs = [last[str(index)] for index in range(len(prompts))]
    served.first_token_times = [output.metrics.first_token_time - started for output in served.outputs]
    served.last_token_times = [output.metrics.last_token_time - started for output in served.outputs]
    if num_output_tokens and [len(ids) for ids in served.token_ids] != list(num_output_tokens):
        raise RuntimeError("the engine went on after requests were to end")
    return served
