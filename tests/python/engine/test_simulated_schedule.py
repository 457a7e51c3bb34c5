"""The simulator schedules as the engine does: the same requests and durations give the same steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steploop import _C
from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

NUM_REQUESTS = 40
VOCAB_SIZE = 300
CONTENTS = np.random.default_rng(5).integers(2, VOCAB_SIZE, size=(NUM_REQUESTS + 3, 256))

SETTINGS: dict[str, dict[str, Any]] = {
    "on_demand": {},
    "reserve": {"scheduling_policy": "reserve"},
    "estimate": {"scheduling_policy": "estimate"},
    "static": {"scheduling_policy": "static"},
    "watermark": {"watermark": 0.1},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "equal progress": {"prompt_sharing": "equal_progress", "long_prefill_token_threshold": 24},
    "no prefix caching": {"enable_prefix_caching": False},
    "priority": {"queue_order": "priority"},
    "shortest first": {"queue_order": "shortest_first"},
    "longest prefix": {"queue_order": "longest_prefix", "max_bypass": 3},
    "fair": {"queue_order": "fair"},
    "swap": {"preemption_mode": "swap", "num_host_blocks": 20},
}


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_is_the_engines(tiny: Any, name: str) -> None:
    # Scarce: sequences preempt each other where the policy lets them. Groups of prompts begin alike.
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "num_kv_blocks": 44, "block_size": 8}
    settings |= {"max_model_len": 256, **SETTINGS[name]}
    work = Work(7)
    engine = make_engine(tiny, **settings)
    real, durations_us = serve(engine, work)
    assert engine.stats()["num_prefix_hit_tokens"] or name == "no prefix caching"
    assert engine.stats()["num_preemptions"] > 0 or name in ("reserve", "static")
    assert simulate(settings, work, durations_us) == real


class Work:
    """Requests as columns, and before which step each arrives."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.steps = sorted(rng.choice([0, rng.randrange(30)]) for _ in range(NUM_REQUESTS))
        self.segments = [[(rng.randrange(3), 24), (3 + i, rng.randint(1, 90))] for i in range(NUM_REQUESTS)]
        self.max_tokens = [rng.randint(1, 60) for _ in range(NUM_REQUESTS)]
        self.priorities = [rng.randrange(3) for _ in range(NUM_REQUESTS)]
        self.tenants = [rng.randrange(3) for _ in range(NUM_REQUESTS)]

    def prompt(self, index: int) -> list[int]:
        return [int(token) for content, length in self.segments[index] for token in CONTENTS[content][:length]]


def serve(engine: Any, work: Work) -> tuple[list[Any], list[int]]:
    """Steps, as (requests that got a token, sequences, tokens, KV blocks in use after it, preempted), and durations."""
    rows, began, step = [], [], 0
    waiting = list(range(NUM_REQUESTS))
    while waiting or engine.has_unfinished_requests():
        while waiting and work.steps[waiting[0]] <= step:
            index = waiting.pop(0)
            params = _C.SamplingParams(max_tokens=work.max_tokens[index], ignore_eos=True, temperature=0.0)
            options = {"priority": work.priorities[index], "tenant": str(work.tenants[index])}
            engine.add_request(str(index), work.prompt(index), params, **options)
        outputs = engine.step()
        (iteration,) = engine.iteration_stats()
        began.append(round(iteration["timestamp"] * 1e6))
        rows.append(
            (
                sorted(int(output.request_id) for output in outputs if output.token_ids),
                iteration["num_scheduled_requests"],
                iteration["num_context_tokens"] + iteration["num_generation_tokens"],
                iteration["used_num_blocks"],
                iteration["num_preemptions"],
            )
        )
        step += 1
    return rows, [*np.maximum(np.diff(began), 1).tolist(), 1000]


def simulate(settings: dict[str, Any], work: Work, durations_us: list[int]) -> list[Any]:
    """The same of the simulator."""
    began_us = np.concatenate([[0], np.cumsum(durations_us)])
    lengths = [[length for _, length in segments] for segments in work.segments]
    raw = _C.simulate(
        _C.SchedulerConfig(**settings),
        _C.CostModel(dict.fromkeys(COST_FIELDS, 1.0)),
        # A request comes as the step begins that takes it in.
        arrival_us=began_us[work.steps].astype(np.int64),
        num_prompt_tokens=np.array([sum(of_prompt) for of_prompt in lengths], np.int32),
        num_output_tokens=np.array(work.max_tokens, np.int32),
        max_tokens=np.array(work.max_tokens, np.int32),
        priorities=np.array(work.priorities, np.int32),
        tenants=np.array(work.tenants, np.int32),
        segment_offsets=np.arange(0, 2 * NUM_REQUESTS + 1, 2, dtype=np.int64),
        segment_contents=np.array([content for s in work.segments for content, _ in s], np.int64),
        segment_lengths=np.array([length for of_prompt in lengths for length in of_prompt], np.int32),
        step_durations_us=np.array(durations_us, np.int64),
        record_schedule=True,
    )
    schedule = raw["schedule"]
    num_tokens = np.array([sum(of_prompt) for of_prompt in lengths])  # so far: prompts, and what steps have brought
    rows = []
    for step in range(len(schedule["began_us"])):
        span = slice(schedule["offsets"][step], schedule["offsets"][step + 1])
        requests, counts = schedule["requests"][span], schedule["token_counts"][span]
        sampled = requests[schedule["first_tokens"][span] + counts == num_tokens[requests]]
        num_tokens[sampled] += 1
        rows.append(
            (
                sorted(sampled.tolist()),
                len(requests),
                int(counts.sum()),
                int(schedule["num_used_blocks"][step]),
                int(schedule["num_preempted"][step]),
            )
        )
    return rows


COST_FIELDS = (
    "weight_bytes weight_flops_per_token output_bytes output_flops_per_row kv_bytes_per_token attention_flops_per_pair "
    "block_bytes bytes_per_second flops_per_second host_bytes_per_second weight_bandwidth_efficiency "
    "compute_efficiency kv_bandwidth_efficiency attention_compute_efficiency overlap step_us sequence_us "
    "sample_row_us token_us"
).split()
