"""Packs a model: loads it and saves it in the layout that the kernels read. The command `steploop pack`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from steploop.errors import InvalidArgumentError
from steploop.memory import format_bytes
from steploop.weights import (
    PackedCheckpoint,
    check_packed_folder,
    load_model,
    open_checkpoint,
    resolve_dtype,
    save_packed,
)


def pack_model(
    model: str | Path,
    folder: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
) -> int:
    """Loads a model on the CPU and saves it packed, with its tokenizer: a folder to give as `EngineConfig.model`.

    Args:
        model: As `EngineConfig.model`; so are `dtype` and `revision`.
        folder: Made if it is not there. A packed model in it is replaced.
        quantization: None: as the model is.

    Returns:
        The size of the weights' file in bytes.

    Raises:
        InvalidArgumentError: `folder` holds something else or cannot be written, or a setting that cannot be.
        ModelLoadError: the model's files are missing or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
        UnsupportedDeviceError: a dtype in which the CPU does not compute.
    """
    target = Path(folder).expanduser()
    check_packed_folder(target)
    if quantization is not None:
        raise InvalidArgumentError(f"quantization must be None, got {quantization!r}")
    checkpoint = open_checkpoint(model, revision)
    loaded = load_model(checkpoint, resolve_dtype(dtype, checkpoint))
    if isinstance(checkpoint, PackedCheckpoint):
        return save_packed(loaded, checkpoint, target, options=checkpoint.options, quantization=checkpoint.quantization)
    return save_packed(loaded, checkpoint, target)


def run_pack(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        SteploopError: anything the user can mend.
    """
    began = time.monotonic()
    size_bytes = pack_model(arguments.model, arguments.folder, dtype=arguments.dtype, revision=arguments.revision)
    print(f"{arguments.folder}: {format_bytes(size_bytes)} in {time.monotonic() - began:.1f} s")
