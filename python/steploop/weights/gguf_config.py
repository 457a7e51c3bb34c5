"""Maps GGUF metadata and tensor names to a ModelSpec and Hugging Face names."""

from __future__ import annotations

import math
import re
from typing import Any

from steploop.errors import ModelLoadError, UnsupportedModelError
from steploop.weights.gguf_header import GgufHeader
from steploop.weights.spec import ModelSpec, check_architecture

# GGUF's architecture -> the class of the same decoder. Mistral models are stored as llama.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Per-frequency divisors: how GGUF stores Llama 3's rotary scaling. Part of the configuration, not a weight."""

# Llama 3.1 to 3.3 all use these; the file holds only what follows from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL_LENGTH = 1.0, 4.0, 8192


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{suffix}"
    return name


def parse_gguf_config(header: GgufHeader, rope_factors: list[float] | None) -> ModelSpec:
    """The ModelSpec that a GGUF file describes. `rope_factors` are the values of the tensor ROPE_FACTORS.

    Raises:
        ModelLoadError: a key is missing or makes no sense.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelLoadError("the GGUF metadata has no general.architecture")
    check_architecture(arch, tuple(ARCHITECTURES))
    keys = _Keys(header.metadata, arch)
    if keys.integer("expert_count", 0) > 0:
        raise UnsupportedModelError("mixture-of-experts models are not supported")
    tensors = header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError("the GGUF file has no two-dimensional tensor token_embd.weight")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    if num_heads < 1:
        raise ModelLoadError(f"{arch}.attention.head_count must be >= 1, got {num_heads}")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{arch}.{key} must equal the head dimension {head_dim}, got {keys.integer(key)}"
            )
    return ModelSpec(
        architecture=ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=keys.integer("context_length"),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
        **_rope(keys, head_dim, rope_factors),
    )


class _Keys:
    """Typed access to the metadata under the architecture's prefix."""

    def __init__(self, metadata: dict[str, Any], arch: str) -> None:
        self._metadata = metadata
        self._arch = arch

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._arch}.{key}", default)
        if value is None:
            raise ModelLoadError(f"the GGUF metadata has no {self._arch}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # written per layer, the same everywhere
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self._arch}.{key} differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelLoadError(f"{self._arch}.{key} must be an integer >= 0, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(f"{self._arch}.{key} must be a number, got {value!r}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"{self._arch}.{key} must be a string, got {value!r}")
        return value


def _rope(keys: _Keys, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    """The rotary fields of ModelSpec."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.text("rope.scaling.type", "none")
    if factors is not None:
        return {"rope_theta": theta, **_llama3_scaling(theta, head_dim, factors)}
    if kind == "none":
        legacy = keys.number("rope.scale_linear", 1.0)
        return {"rope_theta": theta} | ({} if legacy == 1.0 else {"rope_scaling": "linear", "rope_factor": legacy})
    return {"rope_theta": theta, "rope_scaling": kind, "rope_factor": keys.number("rope.scaling.factor", 1.0)}


def _llama3_scaling(theta: float, head_dim: int, factors: list[float]) -> dict[str, Any]:
    """Recognises Llama 3's scaling by the divisors it leads to.

    Raises:
        UnsupportedModelError: they follow from something else.
    """
    factor = max(factors, default=math.nan)
    expected = _llama3_factors(theta, head_dim, factor) if math.isfinite(factor) and theta > 0 else []
    if len(expected) != len(factors) or any(
        not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, factors, strict=True)
    ):
        raise UnsupportedModelError(f"the rotary factors in {ROPE_FACTORS} are not those of Llama 3")
    return {
        "rope_scaling": "llama3",
        "rope_factor": factor,
        "rope_low_freq_factor": _LLAMA3_LOW,
        "rope_high_freq_factor": _LLAMA3_HIGH,
        "rope_original_max_position_embeddings": _LLAMA3_ORIGINAL_LENGTH,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Each frequency's divisor under Llama 3's rule: 1 for short waves, `factor` for long ones, blended between."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < _LLAMA3_ORIGINAL_LENGTH / _LLAMA3_HIGH:
            factors.append(1.0)
        elif wavelength > _LLAMA3_ORIGINAL_LENGTH / _LLAMA3_LOW:
            factors.append(factor)
        else:
            share = (_LLAMA3_ORIGINAL_LENGTH / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            factors.append(1 / ((1 - share) / factor + share))
    return factors
