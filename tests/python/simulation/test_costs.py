"""Deployment: bytes of weights and KV cache, what fits, and the fields of the cost model, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from steploop import _C
from steploop.errors import InvalidArgumentError
from steploop.simulation import DEVICES, MODELS, Deployment


def deployment(model: str = "opt-13b", device: str = "A100-40GB", **settings: Any) -> Deployment:
    return Deployment(model=MODELS[model], device=DEVICES[device], **settings)


def test_kv_bytes() -> None:
    # PagedAttention (Kwon et al. 2023, section 3): 800 KB for a token of OPT-13B.
    assert deployment().kv_bytes_per_token == 819_200
    assert deployment(tensor_parallel_size=4).kv_bytes_per_token == 204_800
    assert deployment(kv_cache_dtype="int8").kv_bytes_per_token == 460_800
    assert deployment(kv_cache_dtype="fp8").kv_bytes_per_token == 409_600
    # 8 KV heads on 16 devices: each is on two.
    shared = deployment("llama-3-70b", tensor_parallel_size=16).kv_bytes_per_token
    assert shared == deployment("llama-3-70b", tensor_parallel_size=8).kv_bytes_per_token == 40_960


def test_weight_bytes() -> None:
    assert deployment("llama-3-8b").weight_bytes == 2 * MODELS["llama-3-8b"].num_parameters
    assert deployment("llama-3-8b", weight_dtype="int4").weight_bytes == pytest.approx(8.03e9 * 5 / 8, rel=1e-3)
    assert deployment("llama-3-8b", tensor_parallel_size=2).weight_bytes == MODELS["llama-3-8b"].num_parameters


def test_what_memory_holds() -> None:
    whole = deployment()
    room = int(0.9 * 40 * 2**30) - whole.weight_bytes
    assert whole.kv_cache_memory_bytes == room
    assert whole.num_kv_blocks(16, 2048) == room // (16 * 819_200)
    assert whole.num_kv_blocks(16, 2048, 2048 * 819_200) == 128
    assert whole.num_kv_blocks(16, 2048, 2048 * 819_200 + 16 * 819_200 - 1) == 128


def test_too_little_memory() -> None:
    large = deployment("llama-3-70b", "H100")
    needed = 2 * MODELS["llama-3-70b"].num_parameters + 8192 * 327_680
    short = needed - int(0.9 * 80 * 2**30)
    with pytest.raises(InvalidArgumentError) as caught:
        large.num_kv_blocks(16, 8192)
    assert f"do not fit H100 at tensor_parallel_size=1: {short} bytes" in str(caught.value)
    assert str(caught.value).endswith("; they would at 2")
    assert deployment("llama-3-70b", "H100", tensor_parallel_size=2).num_kv_blocks(16, 8192) > 0
    with pytest.raises(InvalidArgumentError, match="nor would 64 of them do"):
        deployment("gpt3-175b", "L4", gpu_memory_utilization=0.1).num_kv_blocks(16, 2048)


@pytest.mark.parametrize(
    ("kv_bytes", "words"),
    [(10**12, "kv_cache_memory_bytes must be at most "), (10**6, "kv_cache_memory_bytes must hold a sequence of")],
)
def test_kv_bytes_out_of_range(kv_bytes: int, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        deployment().num_kv_blocks(16, 2048, kv_bytes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight_dtype": "int3"}, "dtype must be one of float32, bfloat16, float16, fp8, int8, int4, got 'int3'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of "),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide the 40 heads of opt-13b, got 3"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be >= 1, got 0"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be in"),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        deployment(**settings)


def test_cost_fields() -> None:
    model = MODELS["llama-3-8b"]
    fields = deployment("llama-3-8b", "H100").cost_fields(16)
    assert fields["weight_bytes"] == 2 * model.num_linear_parameters == fields["weight_flops_per_token"]
    assert fields["output_bytes"] == 2 * 128256 * 4096
    assert fields["kv_bytes_per_token"] == 131_072
    assert fields["block_bytes"] == 16 * 131_072
    assert (fields["step_us"], fields["token_us"]) == (500, 0)
    # A decode of one sequence with 100 keys: weights, output layer and keys are read at what is reached of 3.35 TB/s.
    reading = (2 * (model.num_linear_parameters + 128256 * 4096) / 0.8 + 100 * 131_072 / 0.7) / 3.35e12
    step = _C.CostModel(fields).duration_us(num_tokens=1, num_sequences=1, num_sample_rows=1, num_decode_keys=100)
    assert step == pytest.approx(500 + 5 + 2 + 1e6 * reading)


def test_cost_of_an_exchange() -> None:
    one = deployment("llama-3-8b", "H100").cost_fields(16)
    four = deployment("llama-3-8b", "H100", tensor_parallel_size=4).cost_fields(16)
    for name in ("weight_bytes", "weight_flops_per_token", "output_bytes", "kv_bytes_per_token"):
        assert four[name] == one[name] / 4
    # Two exchanges a layer, of 10 us and of 1.5 times the 8192 bytes of a token.
    assert four["step_us"] == 500 + 64 * 10
    assert four["token_us"] == pytest.approx(64 * 1.5 * 8192 / 450e9 * 1e6)


def test_fewer_bits_are_multiplied_faster() -> None:
    full, half = (deployment("llama-3-8b", "H100", weight_dtype=name).cost_fields(16) for name in ("bfloat16", "fp8"))
    assert half["flops_per_second"] == 2 * full["flops_per_second"]
    attention = "attention_compute_efficiency"
    assert half["flops_per_second"] * half[attention] == full["flops_per_second"] * full[attention]
    # Where inputs stay in 16 bits; and an A100 has no fp8.
    for name in ("int4", "bfloat16"):
        other = deployment("llama-3-8b", "H100", weight_dtype=name).cost_fields(16)
        assert other["flops_per_second"] == full["flops_per_second"]
    on_a100 = [
        deployment(weight_dtype=name).cost_fields(16)["flops_per_second"] for name in ("bfloat16", "fp8", "int8")
    ]
    assert on_a100 == [312e12, 312e12, 624e12]


def test_keys_are_held_in_whole_heads() -> None:
    # 24 heads in 8 groups of 3. A device of 3 has 8 heads of up to 4 groups, one of 12 has 2 that may be of two.
    model = dataclasses.replace(MODELS["llama-3-8b"], num_heads=24)
    whole = Deployment(model=model, device=DEVICES["H100"]).kv_bytes_per_token

    def heads(degree: int) -> float:
        one = Deployment(model=model, device=DEVICES["H100"], tensor_parallel_size=degree)
        return 8 * one.kv_bytes_per_token / whole

    assert [heads(degree) for degree in (1, 2, 3, 4, 6, 8, 12, 24)] == [8, 4, 4, 2, 2, 1, 2, 1]


def test_more_devices_and_fewer_bytes_are_never_slower() -> None:
    work = {"num_tokens": 64, "num_sequences": 64, "num_sample_rows": 64, "num_decode_keys": 64_000}

    def step(**settings: Any) -> float:
        return _C.CostModel(deployment("llama-3-70b", "H100", **settings).cost_fields(16)).duration_us(**work)

    assert step(tensor_parallel_size=8) < step(tensor_parallel_size=4) < step(tensor_parallel_size=2)
    assert step(weight_dtype="int4") < step(weight_dtype="fp8") < step()
