"""generation_config.json: end-of-sequence tokens and sampling defaults."""

from __future__ import annotations

from typing import Any

import pytest

from steploop.errors import ModelLoadError
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
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 99, "do_sample": True}
    defaults = parse_generation_config(generation, {}, 300)
    assert defaults.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_tokens": 99}


def test_what_is_not_applied_is_said(caplog: pytest.LogCaptureFixture) -> None:
    parse_generation_config({"repetition_penalty": 1.1, "min_p": 0.0}, {}, 300)
    assert "repetition_penalty=1.1" in caplog.text
    assert "min_p" not in caplog.text


@pytest.mark.parametrize(
    "generation",
    [{"eos_token_id": "2"}, {"eos_token_id": [True]}, {"eos_token_id": 2.0}, {"temperature": -1}, {"top_p": "0.9"}],
)
def test_refused(generation: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        parse_generation_config(generation, {}, 300)
