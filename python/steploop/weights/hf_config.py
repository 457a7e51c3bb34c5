"""Reads a Hugging Face config.json into a ModelSpec."""

from __future__ import annotations

from typing import Any

from steploop.errors import ModelLoadError, UnsupportedModelError
from steploop.weights.spec import ModelSpec, check_architecture

# Values that a config.json may leave out because they are the defaults of the class that wrote it.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}


def parse_hf_config(config: dict[str, Any]) -> ModelSpec:
    """The ModelSpec that a parsed config.json describes.

    Raises:
        ModelLoadError: a field is missing or makes no sense.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    architecture = _architecture(config)
    fields = _Fields(config, _CLASS_DEFAULTS[architecture])
    _refuse_unknown_features(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.boolean("attention_bias")
    qwen2 = architecture == "Qwen2ForCausalLM"
    qwen3 = architecture == "Qwen3ForCausalLM"
    llama = architecture == "LlamaForCausalLM"
    num_layers = fields.integer("num_hidden_layers")
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        qkv_bias=qwen2 or ((llama or qwen3) and attention_bias),
        o_bias=(llama or qwen3) and attention_bias,
        mlp_bias=llama and fields.boolean("mlp_bias"),
        qk_norm=qwen3,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        sliding_window=_sliding_window(architecture, fields, num_layers),
        **_rope(fields),
    )


class _Fields:
    """Typed access to a config's fields; JSON null counts as left out."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._config = config
        self._defaults = defaults

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        if value is None and name not in self._config:
            value = self._defaults.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise ModelLoadError(f"config.json has no {name}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"config.json: {name} must be an integer >= 1, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise ModelLoadError(f"config.json has no {name}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(f"config.json: {name} must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise ModelLoadError(f"config.json: {name} is too large") from None

    def boolean(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {name} must be true or false, got {value!r}")
        return value


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelLoadError(f"config.json must name the model's class in `architectures`, got {architectures!r}")
    check_architecture(architectures[0])
    return architectures[0]


def _refuse_unknown_features(fields: _Fields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {activation!r} is not supported; supported: silu")
    if fields.get("quantization_config") is not None:
        raise UnsupportedModelError(
            "checkpoints quantised for Hugging Face (quantization_config) are not supported; "
            "use the float16/bfloat16/float32 original, or a GGUF file"
        )


def _sliding_window(architecture: str, fields: _Fields, num_layers: int) -> int | None:
    """The window, where at least one layer uses it."""
    if fields.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or not set(map(str, layer_types)) <= {
            "full_attention",
            "sliding_attention",
        }:
            raise UnsupportedModelError("layer_types other than full_attention and sliding_attention are not supported")
    if architecture == "MistralForCausalLM":
        return window
    # Llama has no windows, whatever its config says; the Qwen classes switch them on and choose the layers.
    if architecture == "LlamaForCausalLM" or not fields.boolean("use_sliding_window"):
        return None
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    first_windowed = fields.get("max_window_layers", 28)
    if isinstance(first_windowed, bool) or not isinstance(first_windowed, int):
        raise ModelLoadError(f"config.json: max_window_layers must be an integer, got {first_windowed!r}")
    return window if first_windowed < num_layers else None


def _rope(fields: _Fields) -> dict[str, Any]:
    """The rotary fields of ModelSpec, from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"config.json: rope parameters must be an object, got {parameters!r}")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("rotary embeddings that differ between layers are not supported")
    rope = _Fields(parameters, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":
        raise UnsupportedModelError("multimodal rotary embeddings (mrope) are not supported")
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"rotary embeddings on a part of each head are not supported, got {partial}")
    result: dict[str, Any] = {
        "rope_theta": rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        "rope_scaling": kind if isinstance(kind, str) else repr(kind),
    }
    if kind in ("linear", "llama3"):
        result["rope_factor"] = rope.number("factor")
    if kind == "llama3":
        result["rope_low_freq_factor"] = rope.number("low_freq_factor")
        result["rope_high_freq_factor"] = rope.number("high_freq_factor")
        result["rope_original_max_position_embeddings"] = rope.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings")
        )
    return result
