"""bench/quality.py: its figures against direct computations, rescaled weights, and from end to end on a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..weights.small_models import BIASED, save_model


@pytest.fixture
def quality(bench_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(bench_engine.parent))
    monkeypatch.delitem(sys.modules, "quality", raising=False)
    import quality

    return quality


def logits_in_torch(folder: Path, window: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([window])).logits[0]
    return logits


def test_windows(quality: Any) -> None:
    assert quality.cut(range(7), 3) == [[0, 1, 2], [3, 4, 5]]  # one token alone predicts nothing
    assert quality.cut(range(8), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_perplexity_and_agreement(quality: Any) -> None:
    windows = [[0, 1, 2], [2, 0]]
    # Uniform over four tokens: perplexity 4. Then all certainty on the right one: perplexity 1.
    uniform = quality.predict(lambda window: torch.zeros(len(window), 4), windows)
    assert uniform.perplexity == pytest.approx(4)
    assert len(uniform.losses) == 3 and len(uniform.best) == 5

    def knows(window: list[int]) -> torch.Tensor:
        return 100 * torch.nn.functional.one_hot(torch.tensor([*window[1:], 3]), 4).float()

    sure = quality.predict(knows, windows)
    assert sure.perplexity == pytest.approx(1)
    assert sure.agreement(sure) == 1
    assert sure.best.tolist() == [1, 2, 3, 0, 3]
    assert sure.agreement(uniform) == pytest.approx(1 / 5)  # uniform: always token 0


@pytest.mark.parametrize("name", ["llama-mqa", *BIASED])
def test_rescaled_weights_compute_the_same(quality: Any, name: str, tmp_path: Path) -> None:
    from steploop.weights import open_checkpoint

    plain = save_model(tmp_path / "plain", name)
    quality.rescale(open_checkpoint(plain).spec, plain, tmp_path / "rescaled")
    window = torch.randint(250, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = logits_in_torch(plain, window)
    torch.testing.assert_close(logits_in_torch(tmp_path / "rescaled", window), expected, rtol=1e-3, atol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (plain, tmp_path / "rescaled"))
    for part, rows in (("mlp.up_proj", True), ("self_attn.v_proj", True), ("mlp.down_proj", False)):
        key = f"model.layers.1.{part}.weight"
        factors = (after[key] / before[key]).median(1 if rows else 0).values.log()
        assert 0.5 < float(factors.std()) < 0.9
    key = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(before[key], after[key])


def test_end_to_end(quality: Any, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "quality.json"
    rows = ["float32", "bfloat16", "int8", "int8-naive", "int4", "int4-of-file", "bfloat16-kv-int8"]
    arguments = ["--model", str(tiny_llama), "--tokens", "90", "--window", "40", "--threads", "1"]
    assert quality.main([*arguments, "--rows", *rows, "--output", str(output)]) == 0
    assert str(tiny_llama) not in output.read_text()  # a name, not where it lies
    result = json.loads(output.read_text())
    assert set(result) == {"machine", "versions", "settings", "reference", "rows"}
    assert (result["settings"]["num_tokens"], result["settings"]["window"]) == (90, 40)

    # The same, step by step.
    from steploop.tokenizer import Tokenizer
    from steploop.weights import open_checkpoint

    token_ids = Tokenizer.load(open_checkpoint(tiny_llama).tokenizer).encode(
        (Path(quality.ROOT) / "tests" / "data" / "prose.txt").read_text()
    )[:90]
    losses = []
    for window in (token_ids[:40], token_ids[40:80], token_ids[80:]):
        log_probabilities = logits_in_torch(tiny_llama, window).log_softmax(-1)
        losses += [-float(log_probabilities[at, token]) for at, token in enumerate(window[1:])]
    perplexity = math.exp(sum(losses) / len(losses))
    assert len(losses) == 87
    assert result["reference"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)  # in float32

    by_name = {(row["weights"], row["row"]): row for row in result["rows"]}
    kept = [row for row in rows if row != "int4-of-file"]  # only a GGUF file has codes
    assert list(by_name) == [(weights, row) for weights in ("as they are", "rescaled") for row in kept]
    for (_, name), row in by_name.items():
        assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / result["reference"]["perplexity"], rel=1e-5)
        assert 0 < row["top1_agreement"] <= 1
        if name == "float32":
            assert row["perplexity"] == pytest.approx(perplexity, rel=1e-4)
            assert row["top1_agreement"] == 1
    sizes = {name: by_name["as they are", name]["weight_bytes"] for name in kept}
    assert sizes["int4"] < sizes["int8"] == sizes["int8-naive"] < sizes["float32"]
    out = capsys.readouterr().out
    assert "weights rescaled" in out and f"perplexity {result['reference']['perplexity']:.3f}" in out
    assert sum(line.lstrip().startswith("int8-naive ") for line in out.splitlines()) == 2


def test_every_row_can_be_loaded(quality: Any, tmp_path: Path) -> None:
    from steploop.weights import open_checkpoint

    checkpoint = open_checkpoint(save_model(tmp_path, "qwen3"))
    for name, row in quality.ROWS.items():
        model = quality.load(checkpoint, row)
        logits = quality.engine_logits(model, row, 20, 1)(list(range(20)))
        assert logits.shape == (20, 250) and bool(logits.isfinite().all()), name


@pytest.mark.parametrize("arguments", [["--rows", "fp8"], ["--tokens", "1"], ["--window", "1"], ["--tokens", "-3"]])
def test_usage(quality: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        quality.main(arguments)
    assert error.value.code == 2
