"""Threads that share the rows of a step, where linear weights are codes: nobody writes into another's rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steploop.weights import load_model, open_checkpoint

from ..weights.small_models import save_model
from .serving import make_engine

NUM_TOKENS = (
    900  # in one step: from 256 on each thread has a share of the rows, and is ahead of others by what it likes
)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_more_threads_than_cores(quantization: str | None, tmp_path: Path) -> None:
    """Threads that wait for a core fall far behind. Inputs of several widths, and so several widths of their codes."""
    folder = save_model(
        tmp_path, "llama", num_hidden_layers=4, hidden_size=64, intermediate_size=1024, max_position_embeddings=1024
    )
    model = load_model(open_checkpoint(folder), "float32", quantization=quantization)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, NUM_TOKENS).tolist()
    settings = {"num_kv_blocks": 64, "max_num_seqs": NUM_TOKENS}
    expected = make_engine(model, num_threads=1, **settings).teacher_forced_logits(tokens)
    for num_threads in (2, 3, 4, 8):
        engine = make_engine(model, num_threads=num_threads, **settings)
        for _ in range(6):
            assert np.array_equal(engine.teacher_forced_logits(tokens), expected), f"{num_threads} threads"
