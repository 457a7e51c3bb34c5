"""How large the KV cache and the swap space become."""

from __future__ import annotations

from typing import Any

import pytest

from steploop import _C, EngineConfig, InvalidArgumentError
from steploop.memory import format_bytes
from steploop.sizing import KvCacheMemory, size_kv_cache, size_swap_space
from steploop.weights import ModelSpec


def spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
        "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1000, "rope_theta": 1e4,
    }  # fmt: skip
    return ModelSpec(**values | changes)


def size(
    *, available: int = 1 << 30, total: int = 1 << 31, model: ModelSpec | None = None, **settings: Any
) -> tuple[int, int]:
    result = size_kv_cache(
        EngineConfig(model="m", **settings),
        model or spec(),
        bytes_per_token=100,
        memory=KvCacheMemory(
            default_bytes=available // 4,
            default_source=f"a quarter of the {format_bytes(available)} available",
            total_bytes=total,
        ),
    )
    return result.max_model_len, result.num_kv_blocks


@pytest.mark.parametrize(("kv_cache_dtype", "expected"), [("float32", 256), ("bfloat16", 128), ("int8", 64 + 4)])
def test_bytes_of_a_token(kv_cache_dtype: str, expected: int) -> None:
    model = spec(num_layers=3, num_heads=4, num_kv_heads=2)
    got = _C.Engine.kv_bytes_per_token(model.to_native(), kv_cache_dtype)
    assert got == 3 * 2 * 2 * expected  # layers, kv heads, keys and values


def test_default_is_enough_for_every_sequence() -> None:
    assert size(max_num_seqs=3) == (1000, 3 * 63)  # 63 blocks of 16 hold 1000 tokens


def test_default_takes_at_most_a_quarter() -> None:
    # 10 MB free: a quarter holds 1562 blocks of 1600 bytes.
    assert size(available=10**7) == (1000, 1562)


def test_default_shortens_sequences_rather_than_fail(caplog: pytest.LogCaptureFixture) -> None:
    assert size(available=160_000) == (25 * 16, 25)
    assert "max_model_len is 400 instead of the model's 1000" in caplog.text


def test_explicit_size() -> None:
    assert size(num_kv_blocks=63) == (1000, 63)
    assert size(kv_cache_memory_bytes=63 * 1600 + 1599) == (1000, 63)
    assert size(max_model_len=17, num_kv_blocks=2) == (17, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_kv_blocks": 62},
            r"takes 63 blocks .*num_kv_blocks=62 gives 62 .*1.56 KiB too little.*at most 992.*100800",
        ),
        ({"kv_cache_memory_bytes": 1599}, r"gives 0 \(0 bytes\), 98.44 KiB too little; set kv_cache_memory_bytes"),
        ({"max_model_len": 900, "available": 160_000}, "a quarter of the 156.25 KiB available gives 25"),
        ({"available": 0}, "gives 0"),
    ],
)
def test_too_little_for_one_sequence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        size(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kv_cache_memory_bytes": 160_001},
            "=160001 asks .*156.25 KiB, but .* only 156.25 KiB of memory, 1 bytes too little; "
            "lower kv_cache_memory_bytes to at most 160000",
        ),
        ({"num_kv_blocks": 101}, "=101 asks .*157.81 KiB.* 1.56 KiB too little; lower num_kv_blocks to at most 100"),
        ({"num_kv_blocks": 2**31 - 1}, "lower num_kv_blocks"),
        ({"kv_cache_memory_bytes": 2**63 - 1}, "lower kv_cache_memory_bytes"),
    ],
)
def test_more_than_the_memory(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        size(total=160_000, **settings)


def test_all_of_the_memory() -> None:
    assert size(total=160_000, available=0, num_kv_blocks=100) == (1000, 100)
    assert size(total=160_000, available=0, kv_cache_memory_bytes=160_000) == (1000, 100)


def test_longer_than_the_model() -> None:
    with pytest.raises(InvalidArgumentError, match="max_model_len must be <= 1000, got 1001: the model's own limit"):
        size(max_model_len=1001)


def test_sliding_window() -> None:
    """Without windows in the engine, the results are the model's own up to the window's length and no further."""
    windowed = spec(sliding_window=256)
    assert size(model=windowed, max_num_seqs=1) == (256, 16)
    with pytest.raises(InvalidArgumentError, match="must be <= 256, got 257: the model's sliding attention window"):
        size(model=windowed, max_model_len=257)


def swap_space(*, memory: int = 1 << 30, **settings: Any) -> int:
    """Blocks of 1600 bytes beside a KV cache of 63."""
    config = EngineConfig(**{"model": "m", "preemption_mode": "swap"} | settings)
    return size_swap_space(config, num_kv_blocks=63, block_size_bytes=1600, memory_bytes=memory)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"preemption_mode": "recompute"}, 0),
        ({"preemption_mode": "recompute", "memory": 0}, 0),
        ({}, 63),
        ({"preemption_mode": "auto"}, 63),
        ({"memory": 63 * 1600}, 63),
        ({"swap_space_bytes": 1600}, 1),
        ({"swap_space_bytes": 3199}, 1),
        ({"swap_space_bytes": 200 * 1600}, 200),
    ],
)
def test_swap_space(settings: dict[str, Any], num_blocks: int) -> None:
    assert swap_space(**settings) == num_blocks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"swap_space_bytes": 1599},
            "swap_space_bytes must hold at least one KV block, which takes 1600 bytes, got 1599",
        ),
        (
            {"swap_space_bytes": 160_001, "memory": 160_000},
            "=160001 asks for a swap space of 156.25 KiB, but .* only 156.25 KiB of memory, 1 bytes too little; "
            "lower swap_space_bytes to at most 160000",
        ),
        ({"memory": 1599}, "swap_space_bytes must hold at least one KV block, which takes 1600 bytes, got 1599"),
    ],
)
def test_refused_swap_space(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        swap_space(**settings)
