"""EngineConfig: what it refuses, and in which words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steploop import EngineConfig, InvalidArgumentError
from steploop.scheduling import check_token_budget, check_watermark, native_settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"max_num_seqs": 2**31}, "max_num_seqs must be <= 2147483647"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be >= 1"),
        ({"max_model_len": 0}, "max_model_len must be >= 1"),
        ({"max_model_len": 10.5}, "max_model_len must be an integer"),
        ({"block_size": 12}, r"block_size must be one of \(8, 16, 32, 64\), got 12"),
        ({"block_size": 128}, "block_size must be one of"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be >= 1, got 0"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes must be >= 1"),
        ({"kv_cache_memory_bytes": 10, "num_kv_blocks": 1}, "not both: got 1 and 10"),
        ({"num_threads": 0}, "num_threads must be >= 1"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"dtype": "float64"}, "dtype must be one of auto, float32, bfloat16, float16, got 'float64'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, float32, .*, int8, got 'int4'"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"model": ""}, "model must be a path or a name"),
        ({"model": 3}, "model must be a path or a name, got 3"),
        ({"model": None}, "model must be a path or a name, got None"),
        ({"tokenizer": 3}, "tokenizer must be a path or a name, got 3"),
        ({"tokenizer": ""}, "tokenizer must be a path or a name, got ''"),
        ({"revision": 3}, "revision must be a string, got 3"),
        ({"device": 3}, "device must be a string, got 3"),
        ({"device": None}, "device must be a string, got None"),
        ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
        ({"batch_invariant": False}, "batch_invariant=False is for device='cuda'"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be in"),
        ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization must be in .* got 'all'"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be in .* got nan"),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        EngineConfig(**{"model": "m"} | settings)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        EngineConfig(model="m", max_seqs=3)  # type: ignore[call-arg]


NONSENSE = ("yes", 1, 0, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"scheduling_policy": "magic"},
            "scheduling_policy must be one of on_demand, reserve, estimate, static, got 'magic'",
        ),
        ({"scheduling_policy": None}, "scheduling_policy must be one of"),
        (
            {"queue_order": "lifo"},
            "queue_order must be one of fcfs, priority, shortest_first, longest_prefix, fair, got 'lifo'",
        ),
        ({"preemption_mode": "kill"}, "preemption_mode must be one of recompute, swap, auto, got 'kill'"),
        ({"prompt_sharing": "random"}, "prompt_sharing must be one of in_order, equal_progress, got 'random'"),
        *(
            ({name: value}, f"{name} must be True or False, got {value!r}")
            for name in ("enable_chunked_prefill", "enable_prefix_caching")
            for value in NONSENSE
        ),
        *(
            ({name: value}, f"{name} must be {words}")
            for name in ("max_bypass", "long_prefill_token_threshold", "max_waiting_tokens")
            for value, words in (
                (-1, ">= 0, got -1"),
                (2**31, "<= 2147483647, got 2147483648"),
                (True, "an integer, got True"),
                (1.0, "an integer, got 1.0"),
                (None, "an integer, got None"),
            )
        ),
        ({"iteration_stats_capacity": -1}, "iteration_stats_capacity must be >= 0, got -1"),
        ({"iteration_stats_capacity": 2**20 + 1}, "iteration_stats_capacity must be <= 1048576, got 1048577"),
        *(
            ({name: value}, f"{name} must be {words}")
            for name in ("max_num_queued_requests", "max_num_queued_tokens")
            for value, words in ((0, ">= 1, got 0"), (True, "an integer, got True"), (0.5, "an integer, got 0.5"))
        ),
        *(
            ({"watermark": value}, r"watermark must be in \[0, 1\), got")
            for value in (-0.01, 1, 1.5, math.nan, math.inf, "0.1", True, None)
        ),
        *(
            ({"waiting_served_ratio": value}, "waiting_served_ratio must be a number >= 0, got")
            for value in (-0.1, math.nan, math.inf, 10**400, "1", False, None)
        ),
        *(
            ({"target_step_duration_ms": value}, "target_step_duration_ms must be milliseconds > 0, at most .*, got")
            for value in (0, -1, math.nan, math.inf, 1e10, "5", True)
        ),
        ({"swap_space_bytes": 0, "preemption_mode": "swap"}, "swap_space_bytes must be >= 1, got 0"),
        ({"swap_space_bytes": True, "preemption_mode": "swap"}, "swap_space_bytes must be an integer"),
        ({"swap_space_bytes": 4096}, "swap_space_bytes=4096 is for preemption_mode swap or auto, got recompute"),
    ],
)
def test_refused_scheduling(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        EngineConfig(model="m", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_model_len": 2049},
            "max_num_batched_tokens must be >= max_model_len, got 2048 and 2049",
        ),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold=64 cuts prompts into chunks"),
        ({"prompt_sharing": "equal_progress"}, "prompt_sharing=equal_progress cuts prompts into chunks"),
        ({"target_step_duration_ms": 5}, "target_step_duration_ms=5.0 cuts prompts into chunks"),
    ],
)
def test_needs_chunked_prefill(settings: dict[str, Any], words: str) -> None:
    EngineConfig(model="m", **settings)
    with pytest.raises(InvalidArgumentError, match=words):
        EngineConfig(model="m", enable_chunked_prefill=False, **settings)


def test_whole_prompts() -> None:
    config = EngineConfig(model="m", enable_chunked_prefill=False, max_model_len=2048)
    check_token_budget(config, 2048)
    with pytest.raises(InvalidArgumentError, match="got 2048 and 2049"):
        check_token_budget(config, 2049)
    check_token_budget(EngineConfig(model="m"), 2049)


@pytest.mark.parametrize(
    ("watermark", "num_kv_blocks", "num_spare"), [(0.98, 99, None), (0.98, 98, None), (0.99, 100, 99), (0.5, 2, 1)]
)
def test_watermark(watermark: float, num_kv_blocks: int, num_spare: int | None) -> None:
    config = EngineConfig(model="m", watermark=watermark)
    if num_spare is None:
        check_watermark(config, num_kv_blocks)
        return
    with pytest.raises(
        InvalidArgumentError, match=f"={watermark} keeps {num_spare} of {num_kv_blocks} KV blocks free, which leaves 1"
    ):
        check_watermark(config, num_kv_blocks)


def test_a_small_watermark_of_a_small_cache_keeps_nothing() -> None:
    check_watermark(EngineConfig(model="m", watermark=0.4), 2)
    check_watermark(EngineConfig(model="m"), 1)


def test_numbers_of_other_libraries() -> None:
    config = EngineConfig(model="m", max_num_seqs=np.int64(3), watermark=np.float32(0.5))  # type: ignore[arg-type]
    assert type(config.max_num_seqs) is int
    assert type(config.watermark) is float


def test_native_settings() -> None:
    """What the native engine gets: 0 for no limit, microseconds."""
    defaults = native_settings(EngineConfig(model="m"))
    assert (defaults["target_step_duration_us"], defaults["max_num_queued_requests"]) == (0, 0)
    assert (defaults["scheduling_policy"], defaults["queue_order"]) == ("on_demand", "fcfs")
    assert defaults["max_num_queued_tokens"] == 0
    settings = native_settings(
        EngineConfig(
            model="m", target_step_duration_ms=2.5, max_num_queued_requests=7, max_num_queued_tokens=9, max_bypass=3
        )
    )
    assert settings["target_step_duration_us"] == 2500
    assert (settings["max_num_queued_requests"], settings["max_num_queued_tokens"]) == (7, 9)
    assert settings["max_bypass"] == 3
    shortest = native_settings(EngineConfig(model="m", target_step_duration_ms=1e-9))
    assert shortest["target_step_duration_us"] == 1
