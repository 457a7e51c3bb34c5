"""Small engines over the tiny Llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from steploop import LLMEngine

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

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


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> LlamaForCausalLM:
    """The same model in transformers, plainly and in float64: torch's fused float32 attention is off by up to 3e-4."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64, attn_implementation="eager").eval()
