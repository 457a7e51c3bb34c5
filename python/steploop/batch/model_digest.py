"""What tells one model's files from another's, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".gguf", ".safetensors", ".json", ".model", ".jinja")
_EXCERPT_BYTES = 1 << 16


def model_digest(model: str | Path) -> str:
    """Of a model's file, or of the files of its folder: their names and sizes, and the first and the last 64 KiB of
    each. Empty for what is not on this disk."""
    path = Path(model)
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    digest = hashlib.sha256()
    num_files = 0
    for file in files:
        if file.suffix not in _SUFFIXES or not file.is_file():
            continue
        num_files += 1
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        with file.open("rb") as content:
            digest.update(content.read(_EXCERPT_BYTES))
            content.seek(max(0, size - _EXCERPT_BYTES))
            digest.update(content.read(_EXCERPT_BYTES))
    return digest.hexdigest() if num_files else ""
