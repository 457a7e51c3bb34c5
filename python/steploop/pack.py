"""Packs a model: loads it and saves it in the layout that the kernels read. The command `steploop pack`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from steploop.memory import format_bytes
from steploop.weights import (
    PackedCheckpoint,
    check_packed_folder,
    load_model,
    open_checkpoint,
    recipe_for,
    resolve_dtype,
    resolve_quantization,
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
        quantization: As `EngineConfig.quantization`.

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
    checkpoint = open_checkpoint(model, revision)
    quantization = resolve_quantization(quantization, checkpoint)
    loaded = load_model(checkpoint, resolve_dtype(dtype, checkpoint), quantization=quantization)
    options = {}
    if isinstance(checkpoint, PackedCheckpoint):
        options = checkpoint.options
    elif quantization is not None:
        options = recipe_for(checkpoint, quantization).native_options()
    return save_packed(loaded, checkpoint, target, options=options, quantization=quantization)


def run_pack(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        SteploopError: anything the user can mend.
    """
    began = time.monotonic()
    size_bytes = pack_model(
        arguments.model,
        arguments.folder,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        revision=arguments.revision,
    )
    print(f"{arguments.folder}: {format_bytes(size_bytes)} in {time.monotonic() - began:.1f} s")
