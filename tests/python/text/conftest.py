"""The real demo model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from steploop.tokenizer import Tokenizer
from steploop.weights import TokenizerFiles


@pytest.fixture(scope="session")
def smollm(demo_model: Path) -> Tokenizer:
    """SmolLM2's byte-level BPE, out of the GGUF file."""
    return Tokenizer.load(TokenizerFiles(path=str(demo_model.parent), gguf_file=demo_model.name))
