"""Runs the demo's prompts under one policy and measures it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steploop.demo.prompts import DemoPrompt
from steploop.engine import LLMEngine
from steploop.outputs import RequestOutput
from steploop.sampling_params import SamplingParams


@dataclass
class Run:
    """One policy's run over all prompts. Times are seconds since the run began."""

    policy: str
    num_slots: int
    duration: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)
    """Finished, in the order of the prompts."""
    inter_token_latencies: list[float] = field(default_factory=list)
    mean_occupancy: float = 0.0
    """Share of the slots that were at work, mean over the steps; 0 to 1."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_kv_blocks: int = 0
    kv_cache_tokens: int = 0
    """Tokens the KV cache can hold."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Of each prompt: when it entered the batch and when it left."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.duration

    @property
    def times_to_first_token(self) -> list[float]:
        """Of each prompt, seconds from its arrival."""
        return [output.metrics.time_to_first_token or 0.0 for output in self.outputs]

    def summary(self) -> dict[str, Any]:
        """The figures, by name; times in seconds."""
        return {
            "policy": self.policy,
            "duration": self.duration,
            "num_output_tokens": self.num_output_tokens,
            "throughput": self.throughput,
            "ttft_p50": quantile(self.times_to_first_token, 0.5),
            "ttft_p99": quantile(self.times_to_first_token, 0.99),
            "inter_token_latency_p50": quantile(self.inter_token_latencies, 0.5),
            "inter_token_latency_p99": quantile(self.inter_token_latencies, 0.99),
            "mean_occupancy": self.mean_occupancy,
            "num_preemptions": self.num_preemptions,
            "num_steps": self.num_steps,
            "kv_cache_tokens": self.kv_cache_tokens,
        }


@dataclass
class Progress:
    """What a view may show while a run goes on."""

    run: Run
    prompts: Sequence[DemoPrompt]
    latest: dict[int, RequestOutput]
    """Last output of each prompt that has one, by number."""
    stats: dict[str, Any]
    elapsed: float
    num_tokens: int


def run_prompts(
    engine: LLMEngine, prompts: Sequence[DemoPrompt], on_step: Callable[[Progress], None] | None = None
) -> Run:
    """Offers all prompts at once and steps until the last has ended. Greedy, so every policy gives the same tokens.

    Raises:
        InvalidRequestError: the model has no chat template.
    """
    _warm_up(engine)
    run = Run(policy=engine.config.scheduling_policy, num_slots=engine.config.max_num_seqs)
    before = engine.stats()
    token_ids = [_encode(engine, prompt.text) for prompt in prompts]
    started = time.monotonic()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens)
        engine.add_request(str(index), {"prompt_token_ids": token_ids[index]}, params, arrival_time=started)
    latest: dict[int, RequestOutput] = {}
    last_token_times: dict[int, float] = {}
    occupied = num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            num_new = len(output.outputs[0].token_ids) - (
                len(latest[index].outputs[0].token_ids) if index in latest else 0
            )
            num_tokens += num_new
            token_time = output.metrics.last_token_time
            if num_new and token_time is not None:
                if index in last_token_times:
                    run.inter_token_latencies.append(token_time - last_token_times[index])
                last_token_times[index] = token_time
            latest[index] = output
        run.duration = time.monotonic() - started
        stats = engine.stats()
        occupied += stats["last_step"]["num_sequences"]
        if on_step is not None:
            on_step(Progress(run, prompts, latest, stats, run.duration, num_tokens))
    run.outputs = [latest[index] for index in range(len(prompts))]
    stats = engine.stats()
    run.num_preemptions = stats["num_preemptions"] - before["num_preemptions"]
    run.num_steps = stats["num_steps"] - before["num_steps"]
    run.mean_occupancy = occupied / run.num_steps / run.num_slots
    run.num_kv_blocks = stats["num_kv_blocks"]
    run.kv_cache_tokens = run.num_kv_blocks * stats["block_size"]
    run.spans = [_span(output, started) for output in run.outputs]
    return run


def same_tokens(first: Run, second: Run) -> bool:
    """Whether both runs gave every prompt the same tokens."""
    return [output.outputs[0].token_ids for output in first.outputs] == [
        output.outputs[0].token_ids for output in second.outputs
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _warm_up(engine: LLMEngine) -> None:
    """Touches the weights and buffers once, so that the first run measured is not the slower for it."""
    engine.add_request("warm-up", {"prompt_token_ids": [0] * 32}, SamplingParams(temperature=0, max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()


def _encode(engine: LLMEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None  # checked when the demo starts
    return engine.tokenizer.encode_rendered(engine.tokenizer.render_chat([{"role": "user", "content": text}]))


def _span(output: RequestOutput, started: float) -> tuple[float, float]:
    metrics = output.metrics
    first = started if metrics.first_scheduled_time is None else metrics.first_scheduled_time
    last = first if metrics.last_token_time is None else metrics.last_token_time
    return first - started, last - started
