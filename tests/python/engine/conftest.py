"""Engines over shared models, and the reference they are held against: transformers in float32 on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steploop.weights import load_model, open_checkpoint

TEXT = Path(__file__).parents[2] / "data" / "prose.txt"


@pytest.fixture(scope="session")
def demo_models(demo_model: Path) -> Callable[[str], Any]:
    """The demo model's weights by dtype, each loaded once."""
    loaded: dict[str, Any] = {}

    def get(dtype: str) -> Any:
        if dtype not in loaded:
            loaded[dtype] = load_model(open_checkpoint(str(demo_model), None), dtype)
        return loaded[dtype]

    return get


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Any:
    """The demo model in transformers, read by transformers' own GGUF loader."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="session")
def text_token_ids(demo_model: Path) -> list[int]:
    """2,000 tokens of prose."""
    from steploop.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(open_checkpoint(str(demo_model), None).tokenizer)
    token_ids = tokenizer.encode(TEXT.read_text())
    assert len(token_ids) >= 2000
    return token_ids[:2000]


@pytest.fixture(scope="session")
def text_logits(reference: Any, text_token_ids: list[int]) -> torch.Tensor:
    """The reference's logits after each token of the text, [2000, vocab_size]."""
    with torch.no_grad():
        return reference(torch.tensor([text_token_ids])).logits[0]
