"""Quantised models: packed and loaded again, what is refused, and weights that are no numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from steploop import EngineConfig, LLMEngine, SamplingParams
from steploop.cli import main
from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedDeviceError, UnsupportedModelError
from steploop.pack import pack_model
from steploop.weights import (
    load_model,
    open_checkpoint,
    recipe_for,
)
from steploop.weights.recipe import RECIPES

from .gguf_writing import write_gguf
from .small_models import KINDS, difference, logits_of, save_model, some_tokens, tokens_by_request

Weights = dict[str, torch.Tensor]
QUANTIZATIONS = list(RECIPES)


# ---- Packed models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_packed_is_what_was_quantised(tiny_llama: Path, tmp_path: Path, quantization: str, dtype: str) -> None:
    pack_model(tiny_llama, tmp_path / "packed", dtype=dtype, quantization=quantization)
    tokens = some_tokens(300)
    fresh = load_model(open_checkpoint(tiny_llama), dtype, quantization=quantization)
    packed = load_model(open_checkpoint(tmp_path / "packed"), dtype)
    assert packed.weight_bytes == fresh.weight_bytes
    assert torch.equal(logits_of(packed, tokens, kv_cache_dtype=dtype), logits_of(fresh, tokens, kv_cache_dtype=dtype))
    results = []
    for settings in (
        {"model": tiny_llama, "quantization": quantization, "dtype": dtype},
        {"model": tmp_path / "packed"},
        {"model": tmp_path / "packed", "quantization": quantization},
    ):
        engine = LLMEngine(**settings, num_kv_blocks=64, num_threads=1)
        assert (engine.quantization, engine.dtype) == (quantization, dtype)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
        engine.add_request("one", {"prompt_token_ids": tokens[:40]}, params)
        results.append(tokens_by_request(engine))
        engine.close()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_packed_codes_of_a_gguf_file(llama_weights: Weights, tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights, kind=KINDS[kind])
    pack_model(tmp_path / "m.gguf", tmp_path / "packed", dtype="float32", quantization="int4")
    checkpoint = open_checkpoint(tmp_path / "packed")
    fresh = load_model(open_checkpoint(tmp_path / "m.gguf"), "float32", quantization="int4")
    tokens = some_tokens(300)
    assert torch.equal(logits_of(load_model(checkpoint, "float32"), tokens), logits_of(fresh, tokens))


def test_packed_again(tiny_llama: Path, tmp_path: Path) -> None:
    pack_model(tiny_llama, tmp_path / "a", quantization="int8")
    pack_model(tmp_path / "a", tmp_path / "b")
    checkpoint = open_checkpoint(tmp_path / "b")
    tokens = some_tokens(300)
    first = load_model(open_checkpoint(tmp_path / "a"), "float32")
    assert torch.equal(logits_of(load_model(checkpoint, "float32"), tokens), logits_of(first, tokens))


def test_packed_with_another_quantisation(tiny_llama: Path, tmp_path: Path) -> None:
    pack_model(tiny_llama, tmp_path / "int8", quantization="int8")
    pack_model(tiny_llama, tmp_path / "none")
    for name, asked, words in (
        ("int8", "int4", "packed with quantization int8, got int4"),
        ("none", "int8", "packed with quantization None, got int8"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            LLMEngine(model=tmp_path / name, quantization=asked)
        with pytest.raises(InvalidArgumentError, match=words):
            load_model(open_checkpoint(tmp_path / name), "float32", quantization=asked)
        with pytest.raises(InvalidArgumentError, match=words):
            pack_model(tmp_path / name, tmp_path / "new", quantization=asked)
    assert not (tmp_path / "new").exists()


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["fp8", "INT8", "", 8, True])
def test_unknown_quantisations(tiny_llama: Path, tmp_path: Path, quantization: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="quantization must be one of int8, int4"):
        EngineConfig(model=tiny_llama, quantization=quantization)
    with pytest.raises(InvalidArgumentError, match="quantization must be one of int8, int4"):
        load_model(open_checkpoint(tiny_llama), "float32", quantization=quantization)
    with pytest.raises(InvalidArgumentError, match="quantization must be one of int8, int4"):
        recipe_for(open_checkpoint(tiny_llama), quantization)
    with pytest.raises(InvalidArgumentError, match="quantization must be one of int8, int4"):
        pack_model(tiny_llama, tmp_path / "packed", quantization=quantization)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("command", [["generate", "MODEL", "hello"], ["pack", "MODEL", "FOLDER"]])
def test_unknown_quantisations_on_the_command_line(
    command: list[str], tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"MODEL": str(tiny_llama), "FOLDER": str(tmp_path / "packed")}
    with pytest.raises(SystemExit) as error:
        main([*(names.get(word, word) for word in command), "--quantization", "fp8"])
    assert error.value.code == 2
    assert "int8" in capsys.readouterr().err


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantised_on_the_command_line(
    quantization: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--temperature", "0", "--max-tokens", "9", "--ignore-eos"]
    texts = []
    assert main(["generate", str(tiny_llama), "--quantization", quantization, *options, "hello"]) == 0
    texts.append(json.loads(capsys.readouterr().out)["text"])
    assert main(["pack", str(tiny_llama), str(tmp_path / "packed"), "--quantization", quantization]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "packed"), *options, "hello"]) == 0
    texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    other = "int4" if quantization == "int8" else "int8"
    assert main(["generate", str(tmp_path / "packed"), "--quantization", other, "hello"]) == 1
    assert f"packed with quantization {quantization}, got {other}" in capsys.readouterr().err


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_cuda_takes_no_quantisation(tiny_llama: Path, quantization: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"quantization='{quantization}' is for device='cpu', got 'cuda'"):
        EngineConfig(model=tiny_llama, quantization=quantization, device="cuda")
    with pytest.raises(UnsupportedDeviceError, match=f"quantization='{quantization}' is for device cpu, got .*cuda"):
        load_model(open_checkpoint(tiny_llama), "bfloat16", "cuda", quantization)


def test_int4_needs_whole_groups(tmp_path: Path) -> None:
    for changes in ({"hidden_size": 80}, {"intermediate_size": 208}, {"head_dim": 80, "num_attention_heads": 1,
                    "num_key_value_heads": 1}):  # fmt: skip
        folder = save_model(tmp_path / "-".join(changes), "llama", **changes)
        checkpoint = open_checkpoint(folder)
        words = r"int4 needs in_features to be a multiple of 32, got (80|208); int8 and bfloat16 do not"
        with pytest.raises(UnsupportedModelError, match=words):
            load_model(checkpoint, "float32", quantization="int4")
        with pytest.raises(UnsupportedModelError, match="multiple of 32"):
            pack_model(folder, tmp_path / "packed", quantization="int4")
        assert not (tmp_path / "packed").exists()
        tokens = some_tokens(checkpoint.spec.vocab_size)
        got = logits_of(load_model(checkpoint, "float32", quantization="int8"), tokens)
        assert difference(got, logits_of(load_model(checkpoint, "float32"), tokens)) < 0.08


def drop(weights: Weights) -> None:
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]


def drop_embedding(weights: Weights) -> None:
    del weights["model.embed_tokens.weight"], weights["lm_head.weight"]


def add(weights: Weights) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(128, 64)
    weights["surprise"] = torch.ones(1)


def reshape(weights: Weights) -> None:
    weights["lm_head.weight"] = torch.ones(299, 64)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.ones(127, 64)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(64)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (drop, ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]),
        (drop_embedding, ["model.embed_tokens.weight", "lm_head.weight"]),
        (add, ["model.layers.2.mlp.up_proj.weight", "surprise"]),
        (reshape, [r"lm_head.weight.*\[299, 64\]", r"q_proj.weight.*\[127, 64\]", r"down_proj.weight.*\[64\]"]),
    ],
)
def test_all_that_does_not_fit_is_named(
    tiny_llama: Path, tmp_path: Path, change: Callable[[Weights], None], names: list[str], quantization: str
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in names:
        with pytest.raises(ModelLoadError, match=name):
            load_model(open_checkpoint(folder), "float32", quantization=quantization)


# ---- Weights that are no numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_that_are_no_numbers_show(
    tiny_llama: Path, tmp_path: Path, quantization: str, place: str, value: float
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.0.{place}.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    logits = logits_of(load_model(open_checkpoint(folder), "float32", quantization=quantization), some_tokens(300, 20))
    assert bool(logits[-1].isnan().any())
    engine = LLMEngine(model=folder, quantization=quantization, num_kv_blocks=64, num_threads=1)
    engine.add_request("bad", {"prompt_token_ids": some_tokens(300, 20)}, SamplingParams(temperature=0, max_tokens=5))
    outputs = [output for _ in range(8) for output in engine.step()]
    engine.close()
    assert outputs[-1].outputs[0].finish_reason == "error"
