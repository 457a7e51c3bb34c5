"""The native scheduler's settings: each that is out of range or contradicts another is refused with its numbers."""

import math
import re

import pytest

from steploop.errors import InvalidArgumentError

from .stepping import add, make_scheduler, run_to_end

NAMES = {
    "scheduling_policy": "on_demand, reserve, estimate, static",
    "queue_order": "fcfs, priority, shortest_first, longest_prefix, fair",
    "preemption_mode": "recompute, swap, auto",
    "prompt_sharing": "in_order, equal_progress",
}
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}


def refused(text, **settings):
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}$"):
        make_scheduler(**settings)


@pytest.mark.parametrize("setting", NAMES)
def test_an_unknown_name_is_told_those_that_exist(setting):
    for name in ("lifo", "", " fcfs", "FCFS", "reserve "):
        refused(f"{setting} must be one of {NAMES[setting]}, got {name}", **{setting: name})
    for name in NAMES[setting].split(", "):
        make_scheduler(**{setting: name})


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_model_len", 2),
        ("num_kv_blocks", 1),
        ("num_host_blocks", 0),
        ("max_bypass", 0),
        ("long_prefill_token_threshold", 0),
        ("max_waiting_tokens", 0),
        ("target_step_duration_us", 0),
    ],
)
def test_the_least_of_each_number(setting, least):
    make_scheduler(**{setting: least})
    for value in (least - 1, -(2**31)):
        refused(f"{setting} must be >= {least}, got {value}", **{setting: value})


def test_block_sizes():
    for block_size in (8, 16, 32, 64):
        make_scheduler(block_size=block_size)
    for block_size in (-8, 0, 1, 12, 24, 128):
        refused(f"block_size must be 8, 16, 32 or 64, got {block_size}", block_size=block_size)


@pytest.mark.parametrize("setting", ["waiting_served_ratio", "swap_block_us"])
def test_ratios_and_durations(setting):
    for value in (0.0, 1.5, 1e300):
        make_scheduler(**{setting: value})
    for value in (-1.5, math.nan, math.inf, -math.inf):
        refused(f"{setting} must be >= 0 and finite, got {value:f}", **{setting: value})


def test_watermarks():
    for value in (0.0, 0.5, 0.875):
        make_scheduler(num_kv_blocks=16, watermark=value)
    for value in (-0.25, 1.0, 2.5, math.nan, math.inf, -math.inf):
        refused(f"watermark must be in [0, 1), got {value:f}", watermark=value)
    text = "watermark {:f} keeps {} of {} KV blocks free, which leaves too few to admit by"
    refused(text.format(0.95, 15, 16), num_kv_blocks=16, watermark=0.95)
    refused(text.format(0.5, 1, 2), num_kv_blocks=2, watermark=0.5)
    make_scheduler(num_kv_blocks=1, watermark=0.95)  # rounded down it keeps none


def test_whole_prompts_need_a_step_that_holds_the_longest():
    make_scheduler(**WHOLE_PROMPTS)
    text = "without chunked prefill a step must hold the longest prompt: max_num_batched_tokens must be >="
    refused(f"{text} max_model_len 128, got 127", **(WHOLE_PROMPTS | {"max_num_batched_tokens": 127}))
    refused(f"{text} max_model_len 129, got 128", **WHOLE_PROMPTS, max_model_len=129)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("long_prefill_token_threshold", 1, "long_prefill_token_threshold"),
        ("prompt_sharing", "equal_progress", "prompt_sharing equal_progress"),
        ("target_step_duration_us", 1, "target_step_duration"),
    ],
)
def test_whole_prompts_contradict_what_cuts_them(setting, value, named):
    make_scheduler(**{setting: value})
    refused(f"{named} needs enable_chunked_prefill", **WHOLE_PROMPTS, **{setting: value})


@pytest.mark.parametrize("sharing", ["in_order", "equal_progress"])
def test_the_largest_numbers(sharing):
    most = 2**31 - 1
    scheduler = make_scheduler(
        max_num_batched_tokens=most,
        max_model_len=most,
        max_bypass=most,
        long_prefill_token_threshold=most,
        max_waiting_tokens=most,
        target_step_duration_us=2**63 - 1,
        prompt_sharing=sharing,
    )
    add(scheduler, 1, 40, 3)
    add(scheduler, 2, 40, 3)
    assert [s.num_scheduled_tokens for s in scheduler.schedule().scheduled] == [40, 40]
    scheduler.update(1, [(1, 7), (2, 7)])
    assert run_to_end(scheduler) == {1: ("length", 3), 2: ("length", 3)}
