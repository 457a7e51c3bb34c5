"""EngineConfig, and the rule that sizes the KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from steploop import EngineConfig, InvalidArgumentError
from steploop.config import KvCacheMemory, size_kv_cache
from steploop.memory import format_bytes
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
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of"),
        ({"scheduling_policy": "magic"}, "scheduling_policy must be one of on_demand, static, got 'magic'"),
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
