"""Models saved in the layout that the CPU kernels read: loading one copies bytes, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steploop import _C
from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedDeviceError
from steploop.weights.checkpoint import Checkpoint, TokenizerFiles
from steploop.weights.folder import tokenizer_in
from steploop.weights.generation import parse_generation_config, to_generation_config
from steploop.weights.packed_file import PACKED_FILE_NAME, PackedFile, write_packed_file
from steploop.weights.spec import spec_from_fields

if TYPE_CHECKING:
    import torch

_TEMPORARY_PREFIX = ".packing-"
# What tokenizers may be saved as. All of them go when a folder is packed again.
_TOKENIZER_PATTERNS = (
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges*",
)
_MIN_WEIGHTS_PER_BYTE = 2  # no layout takes less than 4 bits a weight


@dataclass(frozen=True, kw_only=True)
class PackedCheckpoint(Checkpoint):
    """A model that `save_packed` wrote. It can be loaded in its own dtype only, and on the CPU."""

    file: PackedFile
    options: dict[str, Any]
    """Keywords of `ModelSpec.to_native`."""
    quantization: str | None
    """The name under which the weights were quantised; None: they were not."""

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        raise ModelLoadError(f"{self.path} is packed: it holds no tensors to read or to convert; take the original")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raise ModelLoadError(f"{self.path} is packed: it holds no tensors to read or to convert; take the original")

    def resolve_dtype(self, dtype: str, device: str) -> str:
        """The compute type that `dtype` means.

        Raises:
            InvalidArgumentError: another than the weights are packed in.
            UnsupportedDeviceError: packed models are for the CPU.
        """
        if device == "cuda":
            raise UnsupportedDeviceError(f"{self.path} is packed for device cpu, got device cuda; take the original")
        if dtype not in ("auto", self.dtype):
            raise InvalidArgumentError(f"{self.path} is packed in {self.dtype}, got dtype {dtype}; take the original")
        return self.dtype

    def resolve_quantization(self, quantization: str | None) -> str | None:
        """How the weights are quantised; raises InvalidArgumentError for another one than None or that."""
        if quantization not in (None, self.quantization):
            raise InvalidArgumentError(
                f"{self.path} is packed with quantization {self.quantization}, got {quantization}; take the original"
            )
        return self.quantization

    def load(self) -> _C.Model:
        """Copies the weights into memory.

        Raises:
            ModelLoadError: the file is damaged, or is of another model than it says.
            UnsupportedModelError: a shape that the native core cannot run.
        """
        # First, since a model takes its memory by what the file says.
        if self.spec.num_parameters() > self.file.size_bytes * _MIN_WEIGHTS_PER_BYTE:
            raise ModelLoadError(
                f"{self.path} describes a model of {self.spec.num_parameters()} weights, but its file has "
                f"{self.file.size_bytes} bytes of them"
            )
        self.check_memory(self.file.size_bytes, self.dtype)
        try:
            model = _C.Model(self.spec.to_native(**self.options), dtype=self.dtype)
        except (TypeError, ValueError) as error:
            raise ModelLoadError(f"{self.path} describes a model that cannot be made: {error}") from error
        self.file.read_into(model.packed_arrays())
        model.finish_packed_loading()
        return model


def is_packed(folder: Path) -> bool:
    """Whether `folder` holds a packed model."""
    return (folder / PACKED_FILE_NAME).is_file()


def open_packed(path: Path) -> PackedCheckpoint:
    """Opens a packed model and checks all of it but the weights themselves.

    Args:
        path: Its folder, or the file of its weights.

    Raises:
        ModelLoadError: not a packed model, one that is damaged, or of another layout.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    file = PackedFile(path / PACKED_FILE_NAME if path.is_dir() else path)
    try:
        fields = _checked_content(file.content)
        spec = spec_from_fields(fields["model"])
        generation = parse_generation_config(fields["generation"], {}, spec.vocab_size)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from None
    return PackedCheckpoint(
        path=path,
        spec=spec,
        dtype=fields["dtype"],
        generation=generation,
        tokenizer=tokenizer_in(file.path.parent),
        file=file,
        options=fields["options"],
        quantization=fields["quantization"],
    )


def save_packed(
    model: _C.Model,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> int:
    """Saves a loaded model and its tokenizer as one folder, for `open_packed`. Whole or not at all.

    Args:
        model: On the CPU.
        checkpoint: What it was loaded from.
        folder: Made if it is not there. A packed model in it is replaced.
        options: The keywords with which `ModelSpec.to_native` made the model's config.
        quantization: What the user calls them.

    Returns:
        The size of the weights' file in bytes.

    Raises:
        InvalidArgumentError: `folder` holds something else, or cannot be written.
        ModelLoadError: the tokenizer cannot be loaded.
        UnsupportedDeviceError: the model is on another device.
    """
    check_packed_folder(folder)
    arrays = model.packed_arrays()
    content = {
        "model": dataclasses.asdict(checkpoint.spec),
        "dtype": model.dtype,
        "options": dict(options or {}),
        "quantization": quantization,
        "generation": to_generation_config(checkpoint.generation),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY_PREFIX) as name:
            temporary = Path(name)
            _save_tokenizer(checkpoint.tokenizer, temporary)
            write_packed_file(temporary / PACKED_FILE_NAME, content, arrays, _C.__version__)
            size_bytes = (temporary / PACKED_FILE_NAME).stat().st_size
            _move_into(folder, temporary)
    except OSError as error:
        raise InvalidArgumentError(f"the packed model cannot be written into {folder}: {error}") from error
    return size_bytes


def check_packed_folder(folder: Path) -> None:
    """Whether a packed model may be written there: nothing is, an empty folder, or a packed model.

    Raises:
        InvalidArgumentError: anything else.
    """
    try:
        folder.stat()
        # What begins so was left by a run that was killed.
        if is_packed(folder) or all(entry.name.startswith(_TEMPORARY_PREFIX) for entry in folder.iterdir()):
            return
    except FileNotFoundError:
        return
    except NotADirectoryError:
        pass
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{folder} cannot hold a packed model: {error}") from error
    raise InvalidArgumentError(f"{folder} must be a new folder, an empty one, or a packed model to replace")


def _checked_content(content: dict[str, Any]) -> dict[str, Any]:
    checks: dict[str, Callable[[Any], bool]] = {
        "model": lambda value: isinstance(value, dict),
        "dtype": lambda value: value in ("float32", "bfloat16"),
        "options": lambda value: isinstance(value, dict),
        "quantization": lambda value: value is None or isinstance(value, str),
        "generation": lambda value: isinstance(value, dict),
    }
    if differing := sorted(checks.keys() ^ content.keys()):
        raise ModelLoadError(f"content must have {', '.join(checks)}; missing or unknown: {', '.join(differing)}")
    for name, check in checks.items():
        if not check(content[name]):
            raise ModelLoadError(f"{name} cannot be {content[name]!r}")
    return content


def _save_tokenizer(files: TokenizerFiles | None, folder: Path) -> None:
    if files is None:
        return
    from steploop.tokenizer import Tokenizer

    # Saved rather than copied: it may lie in a GGUF file, and what is saved loads faster.
    Tokenizer.load(files).save(folder)


def _move_into(folder: Path, temporary: Path) -> None:
    # First, so that no weights ever lie beside another model's tokenizer.
    (folder / PACKED_FILE_NAME).unlink(missing_ok=True)
    for pattern in _TOKENIZER_PATTERNS:
        for path in folder.glob(pattern):
            path.unlink()
    # The weights last: with them it is a model.
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == PACKED_FILE_NAME):
        os.replace(path, folder / path.name)
