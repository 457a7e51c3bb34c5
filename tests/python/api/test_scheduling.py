"""Every scheduling setting reaches the scheduler, and none changes a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from steploop import InvalidArgumentError, LLMEngine, SamplingParams

from .running import drain, run, tokens

MakeEngine = Callable[..., LLMEngine]

SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 16, "max_num_seqs": 4}
PROMPTS = [[10 + number] * (8 + 13 * number % 60) for number in range(8)]
PARAMS = [
    SamplingParams(temperature=1.0, seed=number, max_tokens=20 + 11 * number % 40, ignore_eos=True)
    for number in range(8)
]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """Each prompt's tokens when it runs alone; filled by the first test that asks."""
    yield []


@pytest.mark.parametrize(
    "settings",
    [
        *({"scheduling_policy": policy} for policy in ("on_demand", "reserve", "estimate", "static")),
        *({"queue_order": order} for order in ("fcfs", "priority", "shortest_first", "longest_prefix", "fair")),
        *({"preemption_mode": mode} for mode in ("swap", "auto")),
        {"preemption_mode": "swap", "swap_space_bytes": 3 * 16 * 2 * 2 * 64 * 4},  # 3 blocks
        {"watermark": 0.3},
        {"max_bypass": 0, "queue_order": "shortest_first"},
        {"enable_chunked_prefill": False, "waiting_served_ratio": 0.9, "max_waiting_tokens": 3},
        {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 24, "prompt_sharing": "equal_progress"},
        {"target_step_duration_ms": 0.5},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_same_tokens(make_engine: MakeEngine, alone: list[list[int]], settings: dict[str, Any]) -> None:
    if not alone:
        lone = make_engine(max_num_seqs=1)
        alone += [tokens(run(lone, prompt, params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    engine = make_engine(**SMALL | settings)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), prompt, params, priority=-number % 3, tenant=f"tenant {number % 2}")
    outputs = drain(engine)
    assert [tokens(outputs[str(number)][-1]) for number in range(8)] == alone
    engine._native.check_integrity()
    assert engine.stats()["num_used_kv_blocks"] == 0
    if settings.get("scheduling_policy") in ("reserve", "static"):
        assert engine.stats()["num_preemptions"] == 0


def test_swap_space_in_blocks(make_engine: MakeEngine) -> None:
    block = 16 * 2 * 2 * 64 * 4  # tokens, layers, keys and values, head size, bytes
    for settings, num_blocks in (
        ({}, 0),
        ({"preemption_mode": "swap"}, 128),
        ({"preemption_mode": "auto", "swap_space_bytes": 3 * block - 1}, 2),
    ):
        assert make_engine(**settings).stats()["num_host_blocks"] == num_blocks
    with pytest.raises(InvalidArgumentError, match=f"at least one KV block, which takes {block} bytes"):
        make_engine(preemption_mode="swap", swap_space_bytes=block - 1)
    with pytest.raises(InvalidArgumentError, match="lower swap_space_bytes to at most"):
        make_engine(preemption_mode="swap", swap_space_bytes=2**60)


def test_contradictions_that_the_model_brings(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidArgumentError, match="must be >= max_model_len, got 511 and 512"):
        make_engine(enable_chunked_prefill=False, max_num_batched_tokens=511)
    with pytest.raises(InvalidArgumentError, match="watermark=0.995 keeps 127 of 128 KV blocks free"):
        make_engine(watermark=0.995)


def test_whole_prompts_do_not_share_steps_with_decodes(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_chunked_prefill=False, max_num_seqs=4)
    for number in range(8):
        engine.add_request(str(number), PROMPTS[number], dataclasses.replace(PARAMS[number], max_tokens=5 + number))
    drain(engine)
    steps = [(one["num_context_tokens"], one["num_generation_tokens"]) for one in engine.iteration_stats()]
    assert all(context == 0 or generation == 0 for context, generation in steps)
    assert sum(context for context, _ in steps) == sum(map(len, PROMPTS))


def test_longest_prompt_in_chunks(make_engine: MakeEngine) -> None:
    engine = make_engine(long_prefill_token_threshold=24)
    engine.add_request("a", [5] * 60, dataclasses.replace(PARAMS[0], max_tokens=1))
    drain(engine)
    assert [one["num_context_tokens"] for one in engine.iteration_stats()] == [24, 24, 12]


def test_equal_progress(make_engine: MakeEngine) -> None:
    """Two prompts, 16 tokens a step: one after the other, or half and half."""
    for sharing, scheduled in (("in_order", [1, 2, 1]), ("equal_progress", [2, 2, 2])):
        engine = make_engine(max_num_batched_tokens=16, prompt_sharing=sharing, enable_prefix_caching=False)
        for name in "ab":
            engine.add_request(name, [ord(name)] * 24, dataclasses.replace(PARAMS[0], max_tokens=1))
        drain(engine)
        assert [one["num_scheduled_requests"] for one in engine.iteration_stats()] == scheduled, sharing
