"""Weights: opens model files of every supported kind and hands their tensors to the native core.

`source` finds the model, `folder` and `gguf_file` read the two kinds, `spec` is what both lead to; `packed` saves a
loaded model and opens it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steploop.errors import InvalidArgumentError
from steploop.weights.checkpoint import Checkpoint, GenerationDefaults, TokenizerFiles
from steploop.weights.packed import PackedCheckpoint, check_packed_folder, open_packed, save_packed
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


def load_model(checkpoint: Checkpoint, dtype: str, device: str = "cpu") -> _C.Model:
    """Reads every weight into a native model, one at a time; the files' pages are given back as it goes. A packed
    model's memory is read as it is.

    Raises:
        ModelLoadError: missing, unexpected or mis-shaped tensors (all of them are named), damaged files, or a model
            larger than this machine's memory.
        UnsupportedModelError: a shape the native core cannot run.
        UnsupportedDeviceError: no such device here, or another than a packed model's.
        InvalidArgumentError: another dtype than a packed model's.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        checkpoint.resolve_dtype(dtype, device)
        return checkpoint.load()
    import torch

    from steploop import _C

    if device == "cpu":
        checkpoint.check_memory(checkpoint.spec.num_parameters() * DTYPES[dtype], dtype)
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
    "PackedCheckpoint",
    "TokenizerFiles",
    "check_packed_folder",
    "find_tokenizer",
    "load_model",
    "open_checkpoint",
    "open_packed",
    "resolve_dtype",
    "save_packed",
]
