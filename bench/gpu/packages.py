"""What the build, the tests and the engine need of others: what is missing, and what of it a folder of wheels holds."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path

# The oldest version that will do.
BUILD_PACKAGES = {"scikit-build-core": (1, 0), "pybind11": (3, 0)}
BUILD_PROGRAMS = ("cmake", "ninja")
OTHER_PACKAGES = {
    "pytest": (8, 0),
    "hypothesis": (6, 0),
    "numpy": (1, 26),
    "transformers": (5, 0),
    "tokenizers": (0, 22),
    "safetensors": (0, 5),
    "gguf": (0, 17),
    "huggingface-hub": (1, 0),
    "jinja2": (3, 0),
    "rich": (13, 0),
    "accelerate": (1, 0),
}


def is_there(name: str, oldest: tuple[int, ...] = ()) -> bool:
    """Whether a package is installed and new enough."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= oldest


def find_sanitizer() -> str | None:
    """compute-sanitizer, which often lies beside nvcc and not on the path."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def missing_packages() -> list[str]:
    """What is not there, or too old. Programs may also come without a package."""
    missing = [name for name, oldest in (BUILD_PACKAGES | OTHER_PACKAGES).items() if not is_there(name, oldest)]
    return missing + [name for name in BUILD_PROGRAMS if not shutil.which(name) and not is_there(name)]


def needed_to_build(names: list[str]) -> list[str]:
    """Those without which there is no build."""
    return [name for name in names if name in (*BUILD_PACKAGES, *BUILD_PROGRAMS)]


def held_by(folder: Path | None, names: list[str]) -> list[str]:
    """Those of which a wheel lies in the folder."""
    held = {file.name.partition("-")[0].lower() for file in (folder.glob("*.whl") if folder else [])}
    return [name for name in names if name.replace("-", "_") in held]
