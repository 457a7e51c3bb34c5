"""Weights: opens model files of every supported kind and hands their tensors to the native core.

`source` finds the model, `folder` and `gguf_file` read the two kinds, `spec` is what both lead to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steploop.errors import InvalidArgumentError, ModelLoadError
from steploop.memory import format_bytes, total_memory_bytes
from steploop.weights.checkpoint import Checkpoint, GenerationDefaults, TokenizerFiles
from steploop.weights.source import find_tokenizer, open_checkpoint
from steploop.weights.spec import ARCHITECTURES, ModelSpec

if TYPE_CHECKING:
    from steploop import _C

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute types, with the size of a number in bytes."""


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: str = "cpu") -> str:
    """The compute type that `dtype` ("auto" or one of `DTYPES`) means for this checkpoint.

    Raises:
        InvalidArgumentError: any other value.
    """
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else checkpoint.dtype
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def load_model(checkpoint: Checkpoint, dtype: str, device: str = "cpu") -> _C.Model:
    """Reads every weight into a native model, one at a time; the files' pages are given back as it goes.

    Raises:
        ModelLoadError: missing, unexpected or mis-shaped tensors (all of them are named), damaged files, or a model
            larger than this machine's memory.
        UnsupportedModelError: a shape the native core cannot run.
        UnsupportedDeviceError: no such device here.
    """
    import torch

    from steploop import _C

    needed, there = checkpoint.spec.num_parameters() * DTYPES[dtype], total_memory_bytes()
    if device == "cpu" and needed > there:
        raise ModelLoadError(
            f"{checkpoint.path} describes a model of {format_bytes(needed)} in {dtype}; "
            f"this machine has {format_bytes(there)} of memory"
        )
    model = _C.Model(checkpoint.spec.to_native(), dtype=dtype, device=device)
    for name, tensor in checkpoint.tensors(getattr(torch, dtype)):
        model.load_weight(name, tensor.contiguous())
        del tensor
    model.finish_loading()
    return model


__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "Checkpoint",
    "GenerationDefaults",
    "ModelSpec",
    "TokenizerFiles",
    "find_tokenizer",
    "load_model",
    "open_checkpoint",
    "resolve_dtype",
]
