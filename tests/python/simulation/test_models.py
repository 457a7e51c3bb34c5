"""ModelShape: parameters, KV elements and operations, by hand; and where shapes come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steploop.errors import InvalidArgumentError, SteploopError
from steploop.simulation.models import MODELS, find_model

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("name", "billions", "kv_elements"),
    [
        # 40 layers of 2 * 40 heads * 128; the papers give 13, 8, 70 and 175 billion, with norms, biases and positions.
        ("opt-13b", 12.84, 409_600),
        ("llama-3-8b", 8.03, 65_536),
        ("llama-3-70b", 70.55, 163_840),
        ("gpt3-175b", 174.56, 2_359_296),
    ],
)
def test_sizes(name: str, billions: float, kv_elements: int) -> None:
    model = find_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert model.num_kv_elements_per_token == kv_elements


def test_by_hand() -> None:
    model = find_model("llama-3-8b")
    # A layer: q and o of 4096 x 4096, k and v of 4096 x 1024, three of 4096 x 14336.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert model.num_linear_parameters == 32 * layer
    assert model.num_output_parameters == 128256 * 4096
    assert model.num_parameters == 32 * layer + 2 * 128256 * 4096
    # 32 heads of 128: a product with a key and one with a value, two operations for each element.
    assert model.attention_flops_per_pair == 32 * 4 * 32 * 128


def test_the_output_layer_of_tied_models_is_the_embedding() -> None:
    model = MODELS["opt-13b"]
    assert model.num_parameters == model.num_linear_parameters + model.num_output_parameters


def test_names_in_any_case() -> None:
    assert find_model("Llama-3-8B") is MODELS["llama-3-8b"]


def test_a_folder_and_its_config(tiny_llama: Path) -> None:
    for path in (tiny_llama, tiny_llama / "config.json"):
        model = find_model(str(path))
        assert model.name == str(path)
        assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads) == (2, 64, 2, 1)
        assert (model.head_dim, model.vocab_size, model.max_model_len) == (64, 300, 512)
        assert model.num_linear_parameters == 2 * (64 * 64 * 2 * 3 + 3 * 64 * 128)


def test_a_config_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(LLAMA_CONFIG))
    assert find_model(str(path)).intermediate_size == 128


def test_unknown() -> None:
    with pytest.raises(InvalidArgumentError, match=r"MODEL must be one of opt-13b, .*; did you mean llama-3-8b\?"):
        find_model("lama-3-8b")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read"), ("[]", "must hold a JSON object"), ('{"model_type": "llama"}', "a.json: ")],
)
def test_bad_configs(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(SteploopError) as caught:
        find_model(str(path))
    assert words in str(caught.value)
