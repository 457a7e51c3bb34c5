"""Finds a model: a local folder, a local GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from steploop.errors import ModelLoadError
from steploop.weights.checkpoint import Checkpoint
from steploop.weights.folder import open_folder
from steploop.weights.gguf_file import open_gguf

# Data only: no pickle, no Python.
_HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
# Some repositories hold the same weights again: in folders, or as one "consolidated" file.
_HUB_LEFT_OUT = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Opens a model and checks all of it but the weights themselves.

    Args:
        model: A folder, a GGUF file, or a hub name such as "organisation/model".
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelLoadError: not found, not downloadable, or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return open_folder(path)
        if path.is_file():
            return open_gguf(path)
    except (OSError, ValueError) as error:  # a name with a null byte, a folder without permission
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{model} cannot be opened: {error}") from error
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(str(model)):
        raise ModelLoadError(f"there is no file or folder {str(model)!r}, and it is no name of a model on the hub")
    return open_folder(_download(str(model), revision))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_LEFT_OUT)
        )
    except Exception as error:  # the hub client raises many kinds, its HTTP client's among them
        raise ModelLoadError(
            f"there is no file or folder {name!r}, and downloading a model of that name from the Hugging Face hub "
            f"failed: {error}. Give the path of a model folder or GGUF file, or check the name, the network and, for "
            "a model that asks for a login, HF_TOKEN"
        ) from error
