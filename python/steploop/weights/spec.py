"""ModelSpec: the shape of a decoder, whatever file it was read from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steploop.checks import as_finite, check_bool, checked_int
from steploop.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from steploop import _C

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_SCALINGS = ("default", "linear", "llama3")

# Above these a file is damaged or hostile. Checked before anything is allocated or counted up to them.
_MAX_LAYERS = 4096
_MAX_SIZE = 2**24
_MAX_ROPE_THETA = 1e12


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the native `ModelConfig` needs, and the limits that hold beside it. Lengths are in tokens.

    Raises:
        ModelLoadError: a size no model has.
        UnsupportedModelError: a rotary embedding the engine lacks.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    """Where set, some layer sees only this many tokens back. Full attention gives the same up to this length."""

    def __post_init__(self) -> None:
        limits = {"num_layers": _MAX_LAYERS, "max_position_embeddings": 2**31 - 1}
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value, limit = getattr(self, name), limits.get(name, _MAX_SIZE)
            if not 1 <= value <= limit:
                raise ModelLoadError(f"{name} must be in 1..{limit}, got {value}")
        for name in ("rms_norm_eps", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelLoadError(f"{name} must be a finite number > 0, got {value}")
        # Below 1 a position's angle grows without bound, until it is no number any more.
        if not 1 <= self.rope_theta <= _MAX_ROPE_THETA:
            raise ModelLoadError(f"rope_theta must be in 1..{_MAX_ROPE_THETA:.0e}, got {self.rope_theta}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelLoadError(f"sliding_window must be >= 1, got {self.sliding_window}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rope_scaling not in ROPE_SCALINGS:
            raise UnsupportedModelError(
                f"rotary embedding of type {self.rope_scaling!r} is not supported; supported: "
                + ", ".join(ROPE_SCALINGS)
            )

    @property
    def max_supported_len(self) -> int:
        """The longest sequence whose results are the model's own, in tokens."""
        length = self.max_position_embeddings
        if self.rope_scaling == "linear":
            # Some configs give the length before scaling, some after; more than this is wrong either way.
            length = int(length * max(self.rope_factor, 1.0))
        return length if self.sliding_window is None else min(length, self.sliding_window)

    @property
    def default_max_len(self) -> int:
        """`max_model_len` unless the caller sets it, in tokens."""
        return min(self.max_position_embeddings, self.max_supported_len)

    def num_parameters(self) -> int:
        """Number of weights (biases and norms left out: they are under one in a thousand)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings

    def to_native(self, linear_formats: Mapping[str, str] | None = None, rotated: Iterable[str] = ()) -> _C.ModelConfig:
        """The native counterpart.

        Args:
            linear_formats: "int8" or "int4" for each kind of linear weight (qkv, o, gate_up, down, lm_head) that is
                stored so.
            rotated: Those of them whose columns are rotated (`steploop.weights.quantize.rotate`).

        Raises:
            UnsupportedModelError: a shape the native core cannot run, such as an unusual head_dim.
        """
        from steploop import _C

        fields: dict[str, Any] = dict(self.__dict__)
        del fields["architecture"], fields["sliding_window"]
        return _C.ModelConfig(**fields, quantization=dict(linear_formats or {}), rotated=set(rotated))


def spec_from_fields(fields: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of these fields, all of them and no others, which may come from anywhere.

    Raises:
        ModelLoadError: a field is missing, unknown, of the wrong type or out of range.
        UnsupportedModelError: as ModelSpec, or another architecture.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(ModelSpec)}
    if differing := sorted(types.keys() ^ fields.keys()):
        raise ModelLoadError(f"a model's fields must be {', '.join(types)}; missing or unknown: {', '.join(differing)}")
    values = {name: _checked_field(name, fields[name], kind) for name, kind in types.items()}
    check_architecture(values["architecture"])
    return ModelSpec(**values)


def _checked_field(name: str, value: Any, kind: str) -> Any:
    if kind == "int" or (kind == "int | None" and value is not None):
        return checked_int(name, value, low=0, error=ModelLoadError)
    if kind == "float":
        number = as_finite(value)
        if number is None:
            raise ModelLoadError(f"{name} must be a finite number, got {value!r}")
        return number
    if kind == "bool":
        check_bool(name, value, error=ModelLoadError)
    elif kind == "str" and not isinstance(value, str):
        raise ModelLoadError(f"{name} must be a string, got {value!r}")
    return value


def check_architecture(architecture: str, names: tuple[str, ...] = ARCHITECTURES) -> None:
    """Raises UnsupportedModelError, naming those we have, unless `architecture` is one of `names`."""
    if architecture not in names:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported: {', '.join(names)}")
