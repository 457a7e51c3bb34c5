"""The file of a packed model: named arrays of bytes and one JSON object, in safetensors' format.

Every byte is covered by a checksum: the header has one of itself, and one of each array.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steploop._C import PACKED_LAYOUT_VERSION
from steploop.errors import ModelLoadError
from steploop.weights.folder import parse_json

PACKED_FILE_NAME = "model.steploop.safetensors"

_FORMAT = "steploop-packed"
_ALIGNMENT = 64  # of each array within the file, in bytes
_HEADER_LIMIT_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<Q")  # of the header, before it
# Read and added to the checksum at a time: little enough to stay in a core's cache.
_CHUNK_BYTES = 2**19
_NO_CHECKSUM = "0" * 64
_MAX_THREADS = 4
_NAMED_AT_MOST = 5


class PackedFile:
    """A checked header; no array has been read yet.

    Raises:
        ModelLoadError: not such a file, a damaged one, or one of another layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        start, size_bytes = _read_start(path)
        header = parse_json(start[_LENGTH.size :], f"{path}: header")
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            raise ModelLoadError(f"{path} is a safetensors file, but none that `steploop pack` wrote")
        if metadata.get("layout") != str(PACKED_LAYOUT_VERSION):
            raise ModelLoadError(
                f"{path} was packed by steploop {metadata.get('written_by')} in layout {metadata.get('layout')}; this "
                f"version reads layout {PACKED_LAYOUT_VERSION}: pack the original again"
            )
        texts = [metadata.get(name) for name in ("checksum", "content", "checksums")]
        checksum, content, checksums = (text if isinstance(text, str) else "" for text in texts)
        if _checksum_without(start, checksum) != checksum:
            raise ModelLoadError(f"{path} is damaged: the checksum of its header is wrong; pack the original again")
        self.content = parse_json(content, f"{path}: content")
        """The JSON object that was written beside the arrays."""
        self._checksums = parse_json(checksums, f"{path}: checksums")
        self._arrays = _layout_of(path, header, len(start), size_bytes)
        if self._checksums.keys() != self._arrays.keys():
            raise ModelLoadError(f"{path} is damaged: it must have a checksum of each array, and of no other")
        self.size_bytes = size_bytes - len(start)
        """Of all arrays together."""

    def read_into(self, arrays: Mapping[str, memoryview]) -> None:
        """Fills `arrays`, which must be those of the file.

        Raises:
            ModelLoadError: arrays are missing, unexpected or of another size, and which; the file is damaged, or has
                changed since it was opened.
        """
        self._check_fit({name: array.nbytes for name, array in arrays.items()})
        # The largest first, so that all threads end at about the same time.
        names = sorted(arrays, key=lambda name: -arrays[name].nbytes)
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        try:
            with self.path.open("rb") as file, ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(lambda name: self._read_array(file.fileno(), name, arrays[name]), names))
        except OSError as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error}") from error

    def _read_array(self, file: int, name: str, array: memoryview) -> None:
        offset, size = self._arrays[name]
        checksum = hashlib.sha256()
        position = 0
        while position < size:
            # Not mapped: a file that is cut meanwhile would end the process.
            length = os.preadv(file, [array[position : position + _CHUNK_BYTES]], offset + position)
            if length == 0:
                raise ModelLoadError(f"{self.path} has become shorter since it was opened")
            checksum.update(array[position : position + length])
            position += length
        if checksum.hexdigest() != self._checksums[name]:
            raise ModelLoadError(f"{self.path} is damaged: the checksum of {name} is wrong; pack the original again")

    def _check_fit(self, sizes: Mapping[str, int]) -> None:
        problems = [f"missing {name}" for name in sizes if name not in self._arrays]
        problems += [f"unexpected {name}" for name in self._arrays if name not in sizes]
        problems += [
            f"{name} has {found} bytes, not {sizes[name]}"
            for name, (_, found) in self._arrays.items()
            if sizes.get(name, found) != found
        ]
        if problems:
            shown = "; ".join(problems[:_NAMED_AT_MOST])
            more = "; ..." if len(problems) > _NAMED_AT_MOST else ""
            raise ModelLoadError(f"{self.path} does not fit its model ({len(problems)} problems): {shown}{more}")


def write_packed_file(path: Path, content: Mapping[str, Any], arrays: Mapping[str, memoryview], version: str) -> None:
    """Writes arrays, whose sizes must be multiples of 64 bytes, and waits until they are on the disk.

    Args:
        content: What JSON can express.
        version: Of steploop.

    Raises:
        OSError: as writing does.
    """
    checksums = {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
    metadata = {
        "format": _FORMAT,
        "layout": str(PACKED_LAYOUT_VERSION),
        "written_by": version,
        "content": json.dumps(content, allow_nan=False),
        "checksums": json.dumps(checksums),
        "checksum": _NO_CHECKSUM,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": "U8", "shape": [array.nbytes], "data_offsets": [begin, end]}
    with path.open("wb") as file:
        file.write(sealed(json.dumps(header, separators=(",", ":")).encode()))
        for array in arrays.values():
            file.write(array)
        file.flush()
        os.fsync(file.fileno())


def sealed(header: bytes) -> bytes:
    """A header as the file begins with it: its length, itself with its checksum in place of zeros, padding."""
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    start = _LENGTH.pack(len(header)) + header
    return start.replace(_NO_CHECKSUM.encode(), hashlib.sha256(start).hexdigest().encode(), 1)


def _checksum_without(start: bytes, checksum: str) -> str:
    """Of what `sealed` returned, as it was before the checksum came in."""
    blank = start.replace(checksum.encode(errors="replace"), _NO_CHECKSUM.encode(), 1)
    return hashlib.sha256(blank).hexdigest()


def _read_start(path: Path) -> tuple[bytes, int]:
    """The file up to its first array, and the size of it all in bytes."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = file.read(_LENGTH.size)
            if len(length) == _LENGTH.size:
                header_bytes = _LENGTH.unpack(length)[0]
                if header_bytes <= min(_HEADER_LIMIT_BYTES, size_bytes - _LENGTH.size):
                    return length + file.read(header_bytes), size_bytes
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    raise ModelLoadError(f"{path} is not a whole safetensors file: its header does not fit it")


def _layout_of(path: Path, entries: dict[str, Any], start: int, end: int) -> dict[str, tuple[int, int]]:
    """Each array's place in the file and its size, in bytes: one after the other from `start` to `end`, without gaps.

    Raises:
        ModelLoadError: anything else.
    """
    layout: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        match entry:
            case {"dtype": "U8", "shape": [int(size)], "data_offsets": [int(first), int(last)]} if last - first == size:
                layout[name] = (start + first, size)
            case _:
                raise ModelLoadError(f"{path} is damaged: {name} must be a run of bytes, of dtype U8")
    position = start
    for name, (offset, size) in sorted(layout.items(), key=lambda item: item[1]):
        if offset != position or offset % _ALIGNMENT or size < 1:
            raise ModelLoadError(f"{path} is damaged: {name} does not begin where the array before it ends")
        position += size
    if position != end:
        raise ModelLoadError(f"{path} is damaged: its header describes {position} bytes, but it has {end}")
    return layout
