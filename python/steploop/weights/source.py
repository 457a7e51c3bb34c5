"""Finds a model or a tokenizer: a local folder, a local file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from steploop.errors import ModelLoadError
from steploop.weights.checkpoint import Checkpoint, TokenizerFiles
from steploop.weights.folder import open_folder
from steploop.weights.gguf_file import open_gguf
from steploop.weights.packed import is_packed, open_packed

# Data only: no pickle, no Python.
_TOKENIZER_PATTERNS = ["*.json", "*.txt", "tokenizer.model", "*.jinja"]
_HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
# Some repositories hold the same weights again: in folders, or as one "consolidated" file.
_HUB_LEFT_OUT = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Opens a model and checks all of it but the weights themselves.

    Args:
        model: A folder (Hugging Face's or a packed model), a GGUF file, or a hub name such as "organisation/model".
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelLoadError: not found, not downloadable, or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return open_packed(path) if path.suffix == ".safetensors" else open_gguf(path)
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a folder without permission, no such ~user
        raise ModelLoadError(f"{model} cannot be opened: {error}") from error
    return _open_folder(_download(str(model), revision, "model", _HUB_PATTERNS))


def find_tokenizer(tokenizer: str | Path) -> TokenizerFiles:
    """Finds a tokenizer where `open_checkpoint` would look for a model: a folder, a GGUF file or a hub name.

    Raises:
        ModelLoadError: not found, or not downloadable.
    """
    try:
        path = Path(tokenizer).expanduser()
        if path.is_dir():
            return TokenizerFiles(path=str(path))
        if path.is_file():
            packed = path.suffix == ".safetensors"
            return TokenizerFiles(path=str(path.parent), gguf_file=None if packed else path.name)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{tokenizer} cannot be opened: {error}") from error
    return TokenizerFiles(path=str(_download(str(tokenizer), None, "tokenizer", _TOKENIZER_PATTERNS)))


def _open_folder(folder: Path) -> Checkpoint:
    return open_packed(folder) if is_packed(folder) else open_folder(folder)


def _download(name: str, revision: str | None, kind: str, patterns: list[str]) -> Path:
    if name.endswith(".gguf") or not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no file or folder {name!r}, and it is no name of a {kind} on the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_LEFT_OUT))
    except Exception as error:  # the hub client raises many kinds, its HTTP client's among them
        raise ModelLoadError(
            f"there is no file or folder {name!r}, and downloading a {kind} of that name from the Hugging Face hub "
            f"failed: {error}. Give the path of a {kind} folder or GGUF file, or check the name, the network and, for "
            "a model that asks for a login, HF_TOKEN"
        ) from error
