"""Small engines over the tiny Llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steploop import LLMEngine

SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 128, "num_threads": 1}


@pytest.fixture
def make_engine(tiny_llama: Path) -> Iterator[Callable[..., LLMEngine]]:
    """Makes engines that are closed after the test."""
    engines: list[LLMEngine] = []

    def make(**settings: Any) -> LLMEngine:
        engines.append(LLMEngine(**{"model": tiny_llama, **SETTINGS, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., LLMEngine]) -> LLMEngine:
    """One engine of its own for each test."""
    return make_engine()
