"""config.json -> ModelSpec: every architecture, both rotary spellings, sliding windows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steploop.errors import ModelLoadError, SteploopError, UnsupportedModelError
from steploop.weights.hf_config import parse_hf_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}


def parse(**changes: Any) -> Any:
    config = BASE | changes
    return parse_hf_config({name: value for name, value in config.items() if value is not ...})


def test_llama() -> None:
    spec = parse()
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (300, 128, 256, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 64)
    assert (spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (1e-5, 50000.0, "default")
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.qk_norm or spec.tie_word_embeddings)
    assert spec.max_supported_len == spec.default_max_len == 1024


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": ...}, {"num_kv_heads": 4}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": ...}, {"head_dim": 32}),
        ({"head_dim": None}, {"head_dim": 32}),
        ({"max_position_embeddings": ...}, {"max_position_embeddings": 2048}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"hidden_act": "swish"}, {}),
        ({"rms_norm_eps": ...}, {"rms_norm_eps": 1e-6}),
        ({"rope_theta": ...}, {"rope_theta": 10000.0}),
        # Llama has no sliding window, whatever its config says.
        ({"sliding_window": 16}, {"sliding_window": None}),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, {"qkv_bias": False, "o_bias": False}),
        (
            {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": ...},
            {"num_kv_heads": 8},
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"qkv_bias": True, "o_bias": False, "qk_norm": False}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"qkv_bias": False, "o_bias": False, "qk_norm": True}),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": ...}, {"head_dim": 128}),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    ],
)
def test_fields(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = parse(**changes)
    assert {name: getattr(spec, name) for name in expected} == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("default", 50000.0, 1.0, 0)),
        ({"rope_scaling": None}, ("default", 50000.0, 1.0, 0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ("linear", 50000.0, 4.0, 0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, ("linear", 50000.0, 2.0, 0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, ("llama3", 50000.0, 8.0, 256)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": ...}, ("default", 7.0, 1.0, 0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, ("default", 7.0, 1.0, 0)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 4.0}}, ("linear", 7.0, 4.0, 0)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}}, ("llama3", 7.0, 8.0, 256)),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}},
            ("llama3", 50000.0, 8.0, 1024),
        ),
    ],
)
def test_rope_spellings(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    spec = parse(**changes)
    assert (
        spec.rope_scaling,
        spec.rope_theta,
        spec.rope_factor,
        spec.rope_original_max_position_embeddings,
    ) == expected


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, 256),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # the class's default
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256}, None),  # not switched on
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256, "use_sliding_window": True},
            None,
        ),  # layer 28 on
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 256,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            256,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 256,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            256,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 256,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3,
            },
            None,
        ),
    ],
)
def test_sliding_window(changes: dict[str, Any], window: int | None) -> None:
    spec = parse(**changes)
    assert spec.sliding_window == window
    # Up to the window full attention is the same thing, so that is how far the model may go.
    assert spec.max_supported_len == min(1024, window or 1024)


def test_linear_scaling_allows_longer_sequences() -> None:
    spec = parse(rope_scaling={"type": "linear", "factor": 4.0})
    assert (spec.default_max_len, spec.max_supported_len) == (1024, 4096)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, "LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": ...}, ModelLoadError, "architectures"),
        ({"architectures": []}, ModelLoadError, "architectures"),
        ({"architectures": [3]}, ModelLoadError, "architectures"),
        ({"hidden_size": ...}, ModelLoadError, "no hidden_size"),
        ({"hidden_size": 0}, ModelLoadError, "hidden_size.*got 0"),
        ({"hidden_size": "64"}, ModelLoadError, "hidden_size.*got '64'"),
        ({"hidden_size": True}, ModelLoadError, "hidden_size.*got True"),
        ({"hidden_size": 1 << 60}, ModelLoadError, "hidden_size"),
        ({"num_hidden_layers": 10**9}, ModelLoadError, "num_layers"),
        ({"num_key_value_heads": 3}, ModelLoadError, "multiple of num_kv_heads"),
        ({"rms_norm_eps": float("nan")}, ModelLoadError, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, ModelLoadError, "rms_norm_eps"),
        ({"rope_theta": -1.0}, ModelLoadError, "rope_theta"),
        ({"rope_theta": 1e-300}, ModelLoadError, r"rope_theta must be in 1..1e\+12, got 1e-300"),
        ({"rope_theta": 1e13}, ModelLoadError, "rope_theta must be in"),
        ({"rope_theta": float("nan")}, ModelLoadError, "rope_theta must be in"),
        ({"tie_word_embeddings": 1}, ModelLoadError, "tie_word_embeddings"),
        ({"rope_parameters": [1]}, ModelLoadError, "rope parameters"),
        ({"rope_scaling": {"type": "linear"}}, ModelLoadError, "no factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, UnsupportedModelError, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"type": "mrope"}}, UnsupportedModelError, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, UnsupportedModelError, "between layers"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "part of each head"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "quantised"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "layer_types": ["chunked_attention"]},
            UnsupportedModelError,
            "layer_types",
        ),
    ],
)
def test_refused(changes: dict[str, Any], error: type[SteploopError], words: str) -> None:
    with pytest.raises(error, match=words):
        parse(**changes)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_reads_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    import transformers

    sizes = {
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1234.0, "factor": 2.0},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = parse_hf_config(json.loads((tmp_path / "config.json").read_text()))
    assert spec.head_dim == (128 if kind == "Qwen3" else 64)
    assert (spec.num_heads, spec.num_kv_heads, spec.hidden_size, spec.vocab_size) == (4, 2, 256, 320)
    assert (spec.rope_scaling, spec.rope_theta, spec.rope_factor) == ("linear", 1234.0, 2.0)
    assert spec.tie_word_embeddings
    assert spec.sliding_window == (4096 if kind == "Mistral" else None)
