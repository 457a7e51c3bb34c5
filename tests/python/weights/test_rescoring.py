"""The largest logits of a quantised output layer come from the rows it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steploop.weights import (
    load_model,
    load_quantized,
    open_checkpoint,
)
from steploop.weights.recipe import Recipe

from .small_models import difference, logits_of, save_model, some_tokens

# ---- Rescoring -------------------------------------------------------------------------------------------------------

HEAD = Recipe(formats={"lm_head": "int8"}, rotated=("lm_head",))
"""Quantises nothing but the output layer: its inputs are those of the float32 model, bit for bit."""


def head_pair(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with a quantised output layer, and without."""
    checkpoint = open_checkpoint(folder)
    models = (load_quantized(checkpoint, "float32", HEAD), load_model(checkpoint, "float32"))
    got, expected = (logits_of(model, tokens) for model in models)
    return got, expected


def rescored_threshold(logits: torch.Tensor) -> torch.Tensor:
    """Of each row: the largest of the 16th best block of 256, or of the worst one where there are fewer."""
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 256), value=-torch.inf)
    maxima = padded.view(len(logits), -1, 256).amax(-1)
    return maxima.topk(min(16, maxima.shape[1])).values[:, -1:]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("vocab_size", [257, 3000, 6001])  # of 2, 12 and 24 blocks
def test_the_largest_logits_are_those_of_the_unquantised_head(vocab_size: int, name: str, tmp_path: Path) -> None:
    got, expected = head_pair(save_model(tmp_path, name, vocab_size=vocab_size), some_tokens(vocab_size, 60))
    assert 1e-5 < difference(got, expected) < 0.03
    errors, scale = (got - expected).abs(), expected.abs().amax()
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    threshold, noise = rescored_threshold(expected), errors.amax()
    exact = errors <= 1e-6 * scale
    assert bool(exact[expected >= threshold + 2 * noise].all())
    # The rest are the codes'; some of these are right by chance.
    others = exact[expected < threshold - 2 * noise]
    assert float(others.float().mean()) < 0.05
    if vocab_size > 256:
        assert int((expected >= threshold + 2 * noise).sum()) >= 2 * len(expected)


@pytest.mark.parametrize("vocab_size", [250, 1000])
def test_logits_that_are_all_equal(vocab_size: int, tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", vocab_size=vocab_size)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:] = weights["lm_head.weight"][0].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    got, expected = head_pair(folder, some_tokens(vocab_size, 40))
    assert bool((expected == expected[:, :1]).all())
    scale = float(expected.abs().amax())
    assert float((got - expected).abs().max()) < 0.03 * scale
    # 512 of a row are computed again, all to the same number.
    again = (got[:, :512] - expected[:, :512]).abs()
    assert float(again.max()) <= 1e-5 * scale


def test_a_vocabulary_of_less_than_a_block(tmp_path: Path) -> None:
    tokens = some_tokens(40, 60)
    got, expected = head_pair(save_model(tmp_path, "llama", vocab_size=40), tokens)
    exact = (got - expected).abs() <= 1e-5 * expected.abs().amax()
    assert bool(exact.any(-1).all())
    assert float((got.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.9


def test_rescoring_leaves_nan_where_it_is(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", vocab_size=1000)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][300, 5] = float("nan")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    got, _ = head_pair(folder, [7])
    assert bool(got.isnan().all())
    got, expected = head_pair(folder, [token for token in some_tokens(1000, 30) if token != 7])
    assert bool(got[:, 300].isnan().all())
    rest = [token for token in range(1000) if token != 300]
    assert bool(got[:, rest].isfinite().all())
    assert difference(got[:, rest], expected[:, rest]) < 0.03
