"""Parses a GGUF header, checking every count and length against the file's size before trusting it."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from steploop.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

# Far above what any model has; they bound the time a hostile header can take.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 23
_MAX_KEPT_ITEMS = 4096

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file; its bytes lie wholly inside the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first, as torch has it: [out_features, in_features]."""
    offset: int
    """From the start of the file, bytes."""
    row_size_bytes: int

    @property
    def num_rows(self) -> int:
        rows = 1
        for extent in self.shape[:-1]:
            rows *= extent
        return rows


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table of a GGUF file."""

    metadata: dict[str, Any]
    """Scalars, strings and short numeric arrays; longer arrays and those of strings are left out."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of the GGUF file at `path`.

    Raises:
        ModelLoadError: not a GGUF file, or one whose header cannot be true.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    except _BadHeader as error:
        raise ModelLoadError(f"{path}: {error}") from None


class _BadHeader(Exception):
    """What is wrong with the header; becomes a ModelLoadError with the file's path."""


class _Reader:
    """A position in the file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def header(self) -> GgufHeader:
        if self._bytes(4, "the magic") != _MAGIC:
            raise _BadHeader("not a GGUF file (it does not start with 'GGUF')")
        version = self._scalar("I")
        if version not in _VERSIONS:
            found = "big-endian GGUF" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise _BadHeader(f"{found} is not supported; supported: little-endian versions 2 and 3")
        num_tensors = self._count("tensors", self._scalar("Q"), _MAX_TENSORS, item_size_bytes=24)
        num_keys = self._count("metadata keys", self._scalar("Q"), _MAX_KEYS, item_size_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise _BadHeader(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(self._scalar("I"), key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise _BadHeader(f"general.alignment must be a power of two, got {alignment!r}")
        data_start = (self._offset + alignment - 1) // alignment * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise _BadHeader(f"tensor {name!r} is there twice")
            tensors[name] = self._checked_tensor(name, kind, shape, data_start + offset)
        return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors)

    def _bytes(self, size: int, what: str) -> bytes:
        left = len(self._data) - self._offset
        if size > left:
            raise _BadHeader(f"truncated: {what} takes {size} bytes, {left} are left")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code), "a number"))[0]

    def _count(self, what: str, count: int, limit: int, *, item_size_bytes: int) -> int:
        left = len(self._data) - self._offset
        if count > limit or count * item_size_bytes > left:
            raise _BadHeader(f"claims {count} {what}, which {left} bytes (and the limit of {limit}) cannot hold")
        return count

    def _string(self, what: str) -> str:
        raw = self._bytes(self._scalar("Q"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _BadHeader(f"{what} is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise _BadHeader(f"metadata key {key!r} has unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, key: str) -> Any:
        kind, count = self._scalar("I"), self._scalar("Q")
        what = f"entries in {key!r}"
        if kind == _STRING:
            # Only walked over: the tokenizer's lists are read by whoever builds the tokenizer.
            for _ in range(self._count(what, count, _MAX_STRINGS, item_size_bytes=8)):
                size = self._scalar("Q")
                left = len(self._data) - self._offset
                if size > left:
                    raise _BadHeader(f"truncated: a string in {key!r} takes {size} bytes, {left} are left")
                self._offset += size
            return None
        if kind not in _SCALARS:
            raise _BadHeader(f"metadata key {key!r} is an array of unknown type {kind}")
        code = _SCALARS[kind]
        item_size_bytes = struct.calcsize("<" + code)
        self._count(what, count, len(self._data), item_size_bytes=item_size_bytes)
        if count > _MAX_KEPT_ITEMS:
            self._offset += count * item_size_bytes
            return None
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * item_size_bytes, what)))

    def _tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _BadHeader(f"tensor {name!r} must have 1 to {_MAX_DIMENSIONS} dimensions, got {num_dimensions}")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, self._scalar("I"), shape[::-1], self._scalar("Q")

    def _checked_tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
            block_size, block_size_bytes = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError):
            raise _BadHeader(f"tensor {name!r} has unknown type {kind}") from None
        if min(shape) < 1 or shape[-1] % block_size:
            raise _BadHeader(f"tensor {name!r} has shape {list(shape)}, which type {known.name} cannot have")
        tensor = GgufTensor(name, known, shape, offset, shape[-1] // block_size * block_size_bytes)
        end = offset + tensor.num_rows * tensor.row_size_bytes
        if end > len(self._data):
            raise _BadHeader(f"truncated: tensor {name!r} ends at byte {end}, the file has {len(self._data)}")
        return tensor
