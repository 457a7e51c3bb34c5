"""Weights: opens model files of every supported kind and hands their tensors to the native core.

`source` finds the model, `folder` and `gguf_file` read the two kinds, `spec` is what both lead to; `recipe` says how
weights are quantised, `quantize` does it, `calibration` measures what they are multiplied with; `packed` saves a loaded
model and opens it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steploop.errors import InvalidArgumentError, UnsupportedDeviceError
from steploop.weights.checkpoint import Checkpoint, GenerationDefaults, TokenizerFiles
from steploop.weights.packed import PackedCheckpoint, check_packed_folder, open_packed, save_packed
from steploop.weights.recipe import RECIPES, Recipe, check_quantization, quantized_weights, recipe_for
from steploop.weights.source import find_tokenizer, open_checkpoint
from steploop.weights.spec import ARCHITECTURES, ModelSpec

if TYPE_CHECKING:
    from steploop import _C

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute types, with the size of a number in bytes."""


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: str = "cpu") -> str:
    """The compute type that `dtype` ("auto" or one of `DTYPES`) means for this checkpoint.

    Raises:
        InvalidArgumentError: any other value, or for a packed model another type than its own.
        UnsupportedDeviceError: a packed model, and not the CPU.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        return checkpoint.resolve_dtype(dtype, device)
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else checkpoint.dtype
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def resolve_quantization(quantization: str | None, checkpoint: Checkpoint, device: str = "cpu") -> str | None:
    """How this checkpoint's weights will be quantised: as asked for, or as they are packed.

    Raises:
        InvalidArgumentError: an unknown name, or for a packed model another than its own.
        UnsupportedDeviceError: any but None, and not the CPU.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        return checkpoint.resolve_quantization(quantization)
    if quantization is not None:
        check_quantization(quantization)
        if device != "cpu":
            raise UnsupportedDeviceError(f"quantization={quantization!r} is for device cpu, got device {device}")
    return quantization


def load_model(checkpoint: Checkpoint, dtype: str, device: str = "cpu", quantization: str | None = None) -> _C.Model:
    """Reads every weight into a native model, one at a time; the files' pages are given back as it goes. A packed
    model's memory is read as it is.

    Args:
        quantization: One of `RECIPES`, or None: no weight is quantised (or, packed, as they are).

    Raises:
        ModelLoadError: missing, unexpected or mis-shaped tensors (all of them are named), damaged files, or a model
            larger than this machine's memory.
        UnsupportedModelError: a shape the native core cannot run, or the quantisation cannot take.
        UnsupportedDeviceError: no such device here, or another than a packed or quantised model's.
        InvalidArgumentError: another dtype or quantisation than a packed model's, an unknown quantisation.
    """
    quantization = resolve_quantization(quantization, checkpoint, device)
    if isinstance(checkpoint, PackedCheckpoint):
        checkpoint.resolve_dtype(dtype, device)
        return checkpoint.load()
    import torch

    from steploop import _C

    if device == "cpu":
        checkpoint.check_memory(weight_bytes(checkpoint.spec, dtype, quantization), dtype)
    torch_dtype = getattr(torch, dtype)
    if quantization is not None:
        return load_quantized(checkpoint, dtype, recipe_for(checkpoint, quantization))
    model = _C.Model(checkpoint.spec.to_native(), dtype=dtype, device=device)
    for name, tensor in checkpoint.tensors(torch_dtype):
        model.load_weight(name, tensor.contiguous())
        del tensor
    model.finish_loading()
    return model


def load_quantized(checkpoint: Checkpoint, dtype: str, recipe: Recipe) -> _C.Model:
    """A native model on the CPU whose weights are quantised as `recipe` says; raises as `load_model`."""
    import torch

    from steploop import _C

    model = _C.Model(checkpoint.spec.to_native(**recipe.native_options()), dtype=dtype)
    model.check_weights(checkpoint.shapes())
    for name, weight in quantized_weights(checkpoint, recipe, getattr(torch, dtype)):
        if isinstance(weight, tuple):
            model.load_quantized_weight(name, *weight)
        else:
            model.load_weight(name, weight)
        del weight
    model.finish_loading()
    return model


def weight_bytes(spec: ModelSpec, dtype: str, quantization: str | None) -> int:
    """About what the weights will take in memory."""
    size = DTYPES[dtype]
    if quantization is None:
        return spec.num_parameters() * size
    embedding = spec.vocab_size * spec.hidden_size
    of_layers = spec.num_parameters() - embedding * (1 if spec.tie_word_embeddings else 2)
    bits = {"int8": 8.25, "int4": 5}  # with scales and minimums
    return int((of_layers * bits[quantization] + embedding * bits["int8"]) / 8) + embedding * size


__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "RECIPES",
    "Checkpoint",
    "GenerationDefaults",
    "ModelSpec",
    "PackedCheckpoint",
    "Recipe",
    "TokenizerFiles",
    "check_packed_folder",
    "find_tokenizer",
    "load_model",
    "load_quantized",
    "open_checkpoint",
    "open_packed",
    "recipe_for",
    "resolve_dtype",
    "resolve_quantization",
    "save_packed",
    "weight_bytes",
]
