"""How a model is quantised: which weights in which format, and what is done to them first so that little is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from steploop.errors import InvalidArgumentError
from steploop.weights.calibration import Calibration, root_mean_square
from steploop.weights.quantize import INT4_GROUP, dequantize_int4, quantize_int4, quantize_int8, rotate

if TYPE_CHECKING:
    import torch

    from steploop.weights.checkpoint import Checkpoint
    from steploop.weights.spec import ModelSpec

LINEAR_KINDS = MappingProxyType(
    {
        "self_attn.q_proj": "qkv",
        "self_attn.k_proj": "qkv",
        "self_attn.v_proj": "qkv",
        "self_attn.o_proj": "o",
        "mlp.gate_proj": "gate_up",
        "mlp.up_proj": "gate_up",
        "mlp.down_proj": "down",
    }
)
"""The native core's name for the linear weights of a layer."""
_LAYER_KINDS = tuple(dict.fromkeys(LINEAR_KINDS.values()))
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

Parts = tuple["torch.Tensor", ...]
"""Codes, scales and, of int4, minimums."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is done to a model's linear weights."""

    formats: Mapping[str, str]
    """"int8" or "int4" for each kind of weight (qkv, o, gate_up, down, lm_head) that is quantised."""
    smoothed: tuple[str, ...] = ()
    """Kinds, of those in the layers, whose input channels' size is shared between the input and the weight: the one is
    divided, and the other multiplied, by the root of the quotient of their magnitudes (SmoothQuant: Xiao et al., 2023).
    What produces the input is divided: the norm before, v before o, up before down."""
    rotated: tuple[str, ...] = ()
    """Kinds whose inputs and weights are rotated."""
    from_codes: bool = False
    """The weights' codes are taken as they are in the file, for the kinds in int4."""

    def native_options(self) -> dict[str, Any]:
        """The keywords of `ModelSpec.to_native` for a model of such weights."""
        return {"linear_formats": dict(self.formats), "rotated": list(self.rotated)}


_INT8 = dict.fromkeys((*_LAYER_KINDS, "lm_head"), "int8")
_INT4 = dict.fromkeys(_LAYER_KINDS, "int4") | {"lm_head": "int8"}
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "int8": Recipe(formats=_INT8, smoothed=_LAYER_KINDS, rotated=tuple(_INT8)),
        "int4": Recipe(formats=_INT4, smoothed=_LAYER_KINDS, rotated=tuple(_INT4)),
    }
)
"""By `EngineConfig.quantization`. The output layer, whose noise goes straight into the logits, never has less than 8
bits; embeddings, of which a step reads a row for each token, stay as they are."""
_EXACT = 3e-3  # of a weight's norm: the rounding of scales, and of weights that bfloat16 holds
_INT4_FROM_CODES = Recipe(formats=_INT4, rotated=("lm_head",), from_codes=True)


def check_quantization(quantization: str) -> None:
    """Raises InvalidArgumentError, naming those there are, unless `quantization` is one of `RECIPES`."""
    if quantization not in RECIPES:
        raise InvalidArgumentError(f"quantization must be one of {', '.join(RECIPES)} or None, got {quantization!r}")


def recipe_for(checkpoint: Checkpoint, quantization: str) -> Recipe:
    """The recipe of that name for this model. In int4, weights that were in 4 bits before are taken as they are.

    Raises:
        InvalidArgumentError: an unknown name.
    """
    check_quantization(quantization)
    recipe = RECIPES[quantization]
    if quantization != "int4":
        return recipe
    layers = range(checkpoint.spec.num_layers)
    if all(checkpoint.stores_int4(f"model.layers.{layer}.{name}.weight") for layer in layers for name in LINEAR_KINDS):
        return _INT4_FROM_CODES
    exact = {
        kind
        for kind in _LAYER_KINDS
        if all(
            _is_exact_in_int4(checkpoint, f"model.layers.{layer}.{name}.weight")
            for layer in {layers[0], layers[-1]}
            for name, kind_of_name in LINEAR_KINDS.items()
            if kind_of_name == kind
        )
    }
    return dataclasses.replace(
        recipe,
        smoothed=tuple(kind for kind in recipe.smoothed if kind not in exact),
        rotated=tuple(kind for kind in recipe.rotated if kind not in exact),
    )


def _is_exact_in_int4(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a weight loses nothing, as one that was in 4 bits before; false for one that does not fit at all."""
    import torch

    shape = checkpoint.shapes().get(name, ())
    if len(shape) != 2 or shape[1] % INT4_GROUP:
        return False
    weight = checkpoint.tensor(name, torch.float32).float()
    return bool((dequantize_int4(*quantize_int4(weight)) - weight).norm() <= _EXACT * weight.norm())


def quantized_weights(
    checkpoint: Checkpoint, recipe: Recipe, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor | Parts]]:
    """Every weight of the model, one layer after the other: a tensor, or the parts of a quantised one.

    The checkpoint must hold the weights that its model needs, in the right shapes.

    Args:
        dtype: What weights that are not quantised will be stored in.
    """
    import torch

    spec, shapes = checkpoint.spec, checkpoint.shapes()
    embedding = checkpoint.tensor(_EMBEDDING, dtype)
    yield _EMBEDDING, embedding
    calibration = Calibration(spec, embedding) if recipe.smoothed else None
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        names = [name for name in shapes if name.startswith(prefix)]
        if recipe.from_codes:
            for name in names:
                codes = checkpoint.int4_codes(name) if _is_quantized(name, recipe) else None
                yield name, codes or checkpoint.tensor(name, dtype)
            continue
        layer = {name.removeprefix(prefix): checkpoint.tensor(name, torch.float32).float() for name in names}
        if calibration is not None:
            smooth_layer(spec, layer, calibration.next_layer(layer), recipe.smoothed)
        for name in list(layer):
            yield prefix + name, _stored(name, layer.pop(name), recipe)
    yield "model.norm.weight", checkpoint.tensor("model.norm.weight", torch.float32)
    if not spec.tie_word_embeddings:
        yield _HEAD, checkpoint.tensor(_HEAD, dtype)
    if "lm_head" in recipe.formats:
        head = checkpoint.tensor(_EMBEDDING if spec.tie_word_embeddings else _HEAD, torch.float32)
        yield "lm_head.codes", _quantized(head.float(), "lm_head", recipe)


def smooth_layer(
    spec: ModelSpec,
    layer: Mapping[str, torch.Tensor],
    magnitudes: Mapping[str, torch.Tensor],
    kinds: Collection[str] = _LAYER_KINDS,
) -> None:
    """Changes a layer's weights, in place, to others that compute the same.

    Args:
        layer: Float32, by name.
        magnitudes: Of the inputs (`Calibration.next_layer`).
        kinds: Those whose inputs change.
    """

    def weights(*names: str) -> list[torch.Tensor]:
        return [layer[f"{name}.weight"] for name in names]

    def bias_of(name: str) -> list[torch.Tensor]:
        return [layer[f"{name}.bias"]] if f"{name}.bias" in layer else []

    if "qkv" in kinds:
        _smooth(
            weights("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            magnitudes["self_attn.q_proj"],
            layer["input_layernorm.weight"],
        )
    if "o" in kinds:  # each value head feeds as many query heads as share it
        _smooth(
            weights("self_attn.o_proj"),
            magnitudes["self_attn.o_proj"],
            *weights("self_attn.v_proj"),
            *bias_of("self_attn.v_proj"),
            shared=(spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim),
        )
    if "gate_up" in kinds:
        _smooth(
            weights("mlp.gate_proj", "mlp.up_proj"),
            magnitudes["mlp.gate_proj"],
            layer["post_attention_layernorm.weight"],
        )
    if "down" in kinds:
        _smooth(weights("mlp.down_proj"), magnitudes["mlp.down_proj"], *weights("mlp.up_proj"), *bias_of("mlp.up_proj"))


def _smooth(
    weights: list[torch.Tensor],
    magnitude: torch.Tensor,
    *producers: torch.Tensor,
    shared: tuple[int, int, int] | None = None,
) -> None:
    """Multiplies the columns of `weights`, and divides the rows of `producers`, by factors that balance the two.

    Args:
        weights: [rows, columns] each.
        magnitude: Of what the producers give, [columns].
        shared: (a, b, c) where columns are [a, b, c] and all b of them come from one row of the producers, [a, c].
    """
    import torch

    of_weights = root_mean_square(torch.cat(weights))
    if shared is not None:
        magnitude, of_weights = (x.view(shared).square().mean(1).sqrt().flatten() for x in (magnitude, of_weights))
    factors = (magnitude.clamp(min=1e-5) / of_weights.clamp(min=1e-8)).sqrt()
    for producer in producers:
        producer.div_(factors.view(-1, *[1] * (producer.dim() - 1)))
    if shared is not None:
        outer, repeats, inner = shared
        factors = factors.view(outer, 1, inner).expand(outer, repeats, inner).flatten()
    for weight in weights:
        weight.mul_(factors)


def _kind_of(name: str) -> str | None:
    """Of a weight's name, whole or within its layer."""
    parts = name.split(".")
    return LINEAR_KINDS.get(".".join(parts[-3:-1])) if parts[-1] == "weight" else None


def _is_quantized(name: str, recipe: Recipe) -> bool:
    return _kind_of(name) in recipe.formats


def _stored(name: str, tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor | Parts:
    kind = _kind_of(name)
    return tensor if kind is None or kind not in recipe.formats else _quantized(tensor, kind, recipe)


def _quantized(weight: torch.Tensor, kind: str, recipe: Recipe) -> Parts:
    if kind in recipe.rotated:
        weight = rotate(weight)
    return quantize_int8(weight) if recipe.formats[kind] == "int8" else quantize_int4(weight)
