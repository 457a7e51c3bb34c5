"""generation_config.json: end-of-sequence tokens and sampling defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from steploop.errors import ModelLoadError
from steploop.weights import open_checkpoint
from steploop.weights.generation import parse_generation_config


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [2, 7, 2]}, {}, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": 5}, (2,)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, (5, 6)),
        ({"eos_token_id": [-1, 2, 1000]}, {}, (2,)),  # ids the model cannot emit
    ],
)
def test_eos(generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert parse_generation_config(generation, config, 300).eos_token_ids == expected


def test_sampling_defaults() -> None:
    ours = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = parse_generation_config({**ours, "max_new_tokens": 99, "do_sample": True}, {}, 300)
    assert defaults.sampling == {**ours, "max_tokens": 99}


def test_what_is_not_applied_is_said(caplog: pytest.LogCaptureFixture) -> None:
    parse_generation_config({"no_repeat_ngram_size": 3, "typical_p": 1.0}, {}, 300)
    assert "no_repeat_ngram_size=3" in caplog.text
    assert "typical_p" not in caplog.text


@pytest.mark.parametrize(
    "generation",
    [{"eos_token_id": "2"}, {"eos_token_id": [True]}, {"eos_token_id": 2.0}, {"temperature": -1}, {"top_p": "0.9"}],
)
def test_refused(generation: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="^the model's generation config: "):
        parse_generation_config(generation, {}, 300)


def test_error_names_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    path = folder / "generation_config.json"
    for generation in ({"temperature": -1}, {"eos_token_id": "2"}):
        path.write_text(json.dumps(generation))
        with pytest.raises(ModelLoadError, match=f"^{path}: {next(iter(generation))} must be"):
            open_checkpoint(folder)
    path.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": "2"}))
    with pytest.raises(ModelLoadError, match="config.json: eos_token_id must be"):
        open_checkpoint(folder)
