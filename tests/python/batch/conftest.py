"""The tiny model as `steploop pack` writes it, which is loaded without transformers and torch."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packed_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from steploop.pack import pack_model

    folder = tmp_path_factory.mktemp("packed") / "tiny"
    pack_model(tiny_llama, folder)
    return folder
