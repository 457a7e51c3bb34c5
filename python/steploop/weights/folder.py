"""Opens a Hugging Face model folder: config.json, safetensors, generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steploop.errors import ModelLoadError
from steploop.weights.checkpoint import Checkpoint, TokenizerFiles
from steploop.weights.generation import parse_generation_config
from steploop.weights.hf_config import parse_hf_config
from steploop.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_JSON_LIMIT_BYTES = 64 * 2**20
# Buffers that old checkpoints stored although they follow from the config.
_COMPUTED_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


@dataclass(frozen=True, kw_only=True)
class FolderCheckpoint(Checkpoint):
    """A Hugging Face model folder."""

    files: tuple[SafetensorsFile, ...]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            for name, tensor in file.tensors():
                if not name.endswith(_COMPUTED_BUFFERS):
                    yield name, tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for file in self.files
            for name, shape in file.shapes.items()
            if not name.endswith(_COMPUTED_BUFFERS)
        }

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        file = next(file for file in self.files if name in file.dtypes)
        return next(tensor.clone() for _, tensor in file.tensors([name]))


def open_folder(folder: Path) -> FolderCheckpoint:
    """Reads and checks everything but the weights themselves.

    Raises:
        ModelLoadError: a file is missing or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json; a model folder needs one beside its safetensors files")
    config = read_json(folder / "config.json")
    spec = parse_hf_config(config)
    files = tuple(SafetensorsFile(path) for path in _weight_files(folder))
    check_no_duplicates(files)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return FolderCheckpoint(
        path=folder,
        spec=spec,
        dtype=_auto_dtype(config, files),
        generation=parse_generation_config(
            generation,
            config,
            spec.vocab_size,
            generation_name=str(generation_path),
            config_name=str(folder / "config.json"),
        ),
        tokenizer=tokenizer_in(folder),
        files=files,
    )


def tokenizer_in(folder: Path) -> TokenizerFiles | None:
    """The folder's tokenizer; None if it has none."""
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return TokenizerFiles(path=str(folder)) if has_tokenizer else None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelLoadError: unreadable, too large, or no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > _JSON_LIMIT_BYTES:
            raise ModelLoadError(f"{path} is {size} bytes long; at most {_JSON_LIMIT_BYTES} are read")
        text = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}") from error
    return parse_json(text, str(path))


def parse_json(text: bytes | str, name: str) -> dict[str, Any]:
    """The JSON object that is `text`; `name` is what errors call it.

    Raises:
        ModelLoadError: no JSON object.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} must hold a JSON object, got {type(value).__name__}")
    return value


def check_no_duplicates(files: tuple[SafetensorsFile, ...]) -> None:
    """Raises ModelLoadError if two files hold a tensor of the same name."""
    owners: dict[str, Path] = {}
    for file in files:
        for name in file.dtypes:
            if name in owners:
                raise ModelLoadError(f"tensor {name} is in both {owners[name].name} and {file.path.name}")
            owners[name] = file.path


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index_path.is_file():
        return _indexed_files(folder, index_path)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelLoadError(
            f"{folder} has {len(found)} safetensors files but neither model.safetensors nor "
            "model.safetensors.index.json to say which belong to the model"
        )
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder} has its weights only as pickle ({', '.join(pickles[:3])}). Loading a pickle runs code from the "
            "file, so steploop never does; convert it with save_pretrained(..., safe_serialization=True)"
        )
    raise ModelLoadError(f"{folder} has no safetensors file")


def _indexed_files(folder: Path, index_path: Path) -> list[Path]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index_path} must map tensor names to file names under `weight_map`")
    names = sorted(set(weight_map.values()))
    for name in names:
        # The index comes with the model: it may name files of this folder, and no others.
        if not name or Path(name).name != name:
            raise ModelLoadError(f"{index_path} names {name!r}, which is not a file of this folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, named in {index_path.name}")
    return [folder / name for name in names]


def _auto_dtype(config: dict[str, Any], files: tuple[SafetensorsFile, ...]) -> str:
    """float32 checkpoints run in float32, all others in bfloat16."""
    stored = config.get("dtype", config.get("torch_dtype"))
    if stored is None:
        stored = "float32" if all(kind == "F32" for file in files for kind in file.dtypes.values()) else "other"
    return "float32" if stored == "float32" else "bfloat16"
