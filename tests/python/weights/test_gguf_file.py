"""GGUF files: every type the gguf package writes, configuration, names, the order of query and key rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from steploop.errors import ModelLoadError, SteploopError, UnsupportedModelError
from steploop.weights import load_model, open_checkpoint

from .gguf_writing import write_gguf


@pytest.fixture(scope="module")
def weights(tiny_llama: Path) -> dict[str, torch.Tensor]:
    """The tiny Llama's weights by their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in open_checkpoint(tiny_llama).tensors(torch.float32)}


def read(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(path).tensors(dtype))


def test_same_weights_as_the_folder(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", weights)
    actual = read(tmp_path / "m.gguf")
    assert actual.keys() == weights.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in weights.items())


def test_transformers_reads_the_same(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """An independent reader agrees on the order of the rows."""
    from transformers import LlamaForCausalLM

    write_gguf(tmp_path / "m.gguf", weights, extra={"llama.rope.dimension_count": 64, "llama.vocab_size": 300})
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    ours = read(tmp_path / "m.gguf")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["nodots", ".", "blk", "blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.strange.weight"])
def test_unknown_tensors_keep_their_names(weights: dict[str, torch.Tensor], tmp_path: Path, name: str) -> None:
    """So that the loader can report them."""
    write_gguf(tmp_path / "m.gguf", weights, tensors={name: np.ones((4, 64), np.float32)})
    assert name in read(tmp_path / "m.gguf")


def test_other_architectures_are_not_permuted(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", weights, arch="qwen2")
    actual = read(tmp_path / "m.gguf")
    assert all(torch.equal(actual[name], tensor) for name, tensor in weights.items())


def writable_types() -> Iterator[GGMLQuantizationType]:
    for kind in GGMLQuantizationType:
        try:
            quantize(np.zeros((1, 256), np.float32), kind)
        except (NotImplementedError, KeyError, ValueError):
            continue
        yield kind


@pytest.mark.parametrize("kind", list(writable_types()), ids=lambda kind: kind.name)
def test_every_writable_type(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 256)  # 256: a whole number of blocks in every type
    write_gguf(
        tmp_path / "m.gguf",
        {"model.embed_tokens.weight": weight},
        kind=kind,
        metadata={"embedding_length": 256},
    )
    expected = torch.from_numpy(np.array(dequantize(quantize(weight.numpy(), kind), kind), np.float32)).view(40, 256)
    assert torch.equal(read(tmp_path / "m.gguf")["model.embed_tokens.weight"], expected)
    in_bfloat16 = read(tmp_path / "m.gguf", torch.bfloat16)["model.embed_tokens.weight"]
    assert torch.equal(in_bfloat16, expected.bfloat16())


def test_vectors_stay_float32(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", weights)
    actual = read(tmp_path / "m.gguf", torch.bfloat16)
    assert actual["model.norm.weight"].dtype == torch.float32
    assert actual["lm_head.weight"].dtype == torch.bfloat16


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steploop.weights import gguf_file

    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 200)  # 3 rows of 64
    weight = torch.randn(37, 64)
    write_gguf(tmp_path / "m.gguf", {"model.embed_tokens.weight": weight})
    assert torch.equal(read(tmp_path / "m.gguf")["model.embed_tokens.weight"], weight)


def spec_of(path: Path, weights: dict[str, torch.Tensor], **options: Any) -> Any:
    write_gguf(path, weights, **options)
    return open_checkpoint(path).spec


def test_configuration(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "m.gguf", weights)
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (300, 64, 128, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 1, 64)
    assert (spec.max_position_embeddings, spec.rope_theta, spec.rope_scaling) == (512, 10000.0, "default")
    assert not (spec.tie_word_embeddings or spec.qkv_bias or spec.qk_norm)


def test_features_follow_from_the_tensors(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    more = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"} | {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(128),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(64),
    }
    spec = spec_of(tmp_path / "m.gguf", more, arch="qwen3")
    assert spec.architecture == "Qwen3ForCausalLM"
    assert spec.tie_word_embeddings
    assert spec.qkv_bias
    assert spec.qk_norm
    assert not (spec.o_bias or spec.mlp_bias)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.freq_base": None}, {"rope_theta": 10000.0}),
        ({"rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_scaling": "linear", "rope_factor": 2.0}),
        ({"rope.scaling.type": "none"}, {"rope_scaling": "default"}),
        ({"rope.scale_linear": 4.0}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ({"attention.sliding_window": 128}, {"sliding_window": 128, "max_supported_len": 128}),
        ({"attention.head_count": [2, 2], "attention.head_count_kv": [1, 1]}, {"num_heads": 2, "num_kv_heads": 1}),
        ({"attention.key_length": None, "attention.value_length": None}, {"head_dim": 32}),
    ],
)
def test_metadata(
    weights: dict[str, torch.Tensor], tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = spec_of(tmp_path / "m.gguf", weights, metadata=metadata)
    assert {name: getattr(spec, name) for name in expected} == expected


def test_llama3_scaling_is_recognised(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    metadata = {"rope.freq_base": 5e5}
    spec = spec_of(tmp_path / "a.gguf", weights, metadata=metadata, tensors={"rope_freqs.weight": factors})
    assert (spec.rope_scaling, spec.rope_factor, spec.rope_theta) == ("llama3", 32.0, 5e5)
    assert (spec.rope_low_freq_factor, spec.rope_high_freq_factor) == (1.0, 4.0)
    assert spec.rope_original_max_position_embeddings == 8192
    assert "rope_freqs.weight" not in read(tmp_path / "a.gguf")
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        spec_of(tmp_path / "b.gguf", weights, metadata=metadata, tensors={"rope_freqs.weight": factors * 1.1})


def test_generation_defaults(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 9999,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    write_gguf(tmp_path / "m.gguf", weights, extra=extra)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.generation.eos_token_ids == (1, 5)
    assert checkpoint.generation.sampling == {"temperature": 0.5, "top_k": 20}
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.tokenizer is None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"arch": "gemma2"}, UnsupportedModelError, "'gemma2'.*llama, qwen2, qwen3"),
        ({"metadata": {"block_count": None}}, ModelLoadError, "no llama.block_count"),
        ({"metadata": {"block_count": 0}}, ModelLoadError, "num_layers"),
        ({"metadata": {"block_count": 2**31}}, ModelLoadError, "num_layers"),
        ({"metadata": {"block_count": "2"}}, ModelLoadError, "llama.block_count must be an integer"),
        ({"metadata": {"attention.head_count": 0}}, ModelLoadError, "head_count must be >= 1"),
        ({"metadata": {"attention.head_count": [2, 4]}}, UnsupportedModelError, "differs between layers"),
        ({"metadata": {"attention.value_length": 32}}, UnsupportedModelError, "value_length"),
        ({"metadata": {"rope.dimension_count": 32}}, UnsupportedModelError, "dimension_count"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, UnsupportedModelError, "'yarn'"),
        ({"metadata": {"rope.freq_base": float("nan")}}, ModelLoadError, "rope_theta"),
        ({"metadata": {"expert_count": 8}}, UnsupportedModelError, "mixture-of-experts"),
        ({"extra": {"tokenizer.ggml.eos_token_id": "x"}}, ModelLoadError, "eos_token_id"),
    ],
)
def test_refused(
    weights: dict[str, torch.Tensor], tmp_path: Path, options: dict[str, Any], error: type[SteploopError], words: str
) -> None:
    with pytest.raises(error, match=words):
        spec_of(tmp_path / "m.gguf", weights, **options)


def test_no_embedding(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    rest = {name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"}
    with pytest.raises(ModelLoadError, match="token_embd"):
        spec_of(tmp_path / "m.gguf", rest)


def test_a_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        {"model.embed_tokens.weight": torch.ones(4, 64)},
        tensors={"blk.0.attn_norm.weight": np.ones(64, np.int32)},
    )
    with pytest.raises(UnsupportedModelError, match="blk.0.attn_norm.weight.*I32"):
        read(tmp_path / "m.gguf")


def test_rows_that_are_no_heads(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", weights, metadata={"attention.head_count": 3, "attention.head_count_kv": 3})
    with pytest.raises(
        ModelLoadError, match=r"wrong shape of model.layers.1.self_attn.q_proj.weight: .* got \[128, 64\]"
    ):
        load_model(open_checkpoint(tmp_path / "m.gguf"), "float32")


def test_demo_model(demo_model: Path) -> None:
    spec = open_checkpoint(demo_model).spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert spec.vocab_size == 49152
    assert spec.num_parameters() == pytest.approx(134_515_008, rel=1e-3)
