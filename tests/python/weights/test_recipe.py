"""Quantised at load: what a recipe does to a model, and GGUF codes as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from steploop import LLMEngine, SamplingParams
from steploop.weights import (
    load_model,
    load_quantized,
    open_checkpoint,
    recipe_for,
    weight_bytes,
)
from steploop.weights.calibration import Calibration, decoder_layer
from steploop.weights.quantize import quantize_int8, rotate
from steploop.weights.recipe import LINEAR_KINDS, RECIPES, Recipe, quantized_weights, smooth_layer

from .gguf_writing import gguf_name, write_gguf
from .small_models import KINDS, MODELS, difference, logits_of, make_model, save_model, some_tokens, tokens_by_request

Weights = dict[str, torch.Tensor]
QUANTIZATIONS = list(RECIPES)
SMOOTHED = RECIPES["int8"].smoothed


@pytest.fixture(scope="module", params=list(MODELS))
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of each kind."""
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


# ---- Smoothing -------------------------------------------------------------------------------------------------------


def layers_of(checkpoint: Any) -> Iterator[Weights]:
    weights = dict(checkpoint.tensors(torch.float32))
    for index in range(checkpoint.spec.num_layers):
        prefix = f"model.layers.{index}."
        yield {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}


def linear(_: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def test_a_smoothed_layer_computes_the_same(model_folder: Path) -> None:
    """In float64, where nothing is lost."""
    checkpoint = open_checkpoint(model_folder)
    spec = checkpoint.spec
    calibration = Calibration(spec, checkpoint.tensor("model.embed_tokens.weight", torch.float32))
    x = torch.randn(50, spec.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in layers_of(checkpoint):
        magnitudes = {name: value.double() for name, value in calibration.next_layer(layer).items()}
        layer = {name: tensor.double() for name, tensor in layer.items()}
        before = {name: tensor.clone() for name, tensor in layer.items()}
        smooth_layer(spec, layer, magnitudes)
        after = decoder_layer(spec, layer, x, linear)
        torch.testing.assert_close(after, decoder_layer(spec, before, x, linear), rtol=1e-10, atol=1e-10)
        assert all(not torch.equal(layer[f"{name}.weight"], before[f"{name}.weight"]) for name in LINEAR_KINDS)


def test_inputs_and_weights_of_down_become_equally_large(model_folder: Path) -> None:
    checkpoint = open_checkpoint(model_folder)
    spec = checkpoint.spec
    embedding = checkpoint.tensor("model.embed_tokens.weight", torch.float32)
    calibration, again = Calibration(spec, embedding), Calibration(spec, embedding)
    for layer in layers_of(checkpoint):
        smooth_layer(spec, layer, calibration.next_layer(layer))
        magnitudes = again.next_layer(layer)
        # The others are changed again as what produces the next input.
        of_weights = layer["mlp.down_proj.weight"].square().mean(0).sqrt()
        torch.testing.assert_close(of_weights, magnitudes["mlp.down_proj"], rtol=2e-3, atol=1e-5)


def test_smoothing_survives_dead_channels(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama-biases")
    weights = load_file(folder / "model.safetensors")
    prefix = "model.layers.1."
    weights[prefix + "mlp.down_proj.weight"][:, 3] = 0  # reads nothing of a channel
    weights[prefix + "mlp.up_proj.weight"][5] = 0  # gives nothing
    weights[prefix + "mlp.up_proj.bias"][5] = 0
    weights[prefix + "input_layernorm.weight"][7] = 0
    for name in "qkv":
        weights[prefix + f"self_attn.{name}_proj.weight"][:, 9] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    tokens = some_tokens(checkpoint.spec.vocab_size)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    smoothed = load_quantized(checkpoint, "float32", Recipe(formats={}, smoothed=SMOOTHED))
    assert difference(logits_of(smoothed, tokens), expected) < 1e-5
    for quantization in QUANTIZATIONS:
        got = logits_of(load_model(checkpoint, "float32", quantization=quantization), tokens)
        assert difference(got, expected) < {"int8": 0.08, "int4": 0.5}[quantization]


# ---- Whole models ----------------------------------------------------------------------------------------------------


def test_models_stay_themselves(model_folder: Path, report: Callable[[str], None]) -> None:
    checkpoint = open_checkpoint(model_folder)
    tokens = some_tokens(checkpoint.spec.vocab_size)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    nothing_done = load_quantized(checkpoint, "float32", Recipe(formats={}))
    assert torch.equal(logits_of(nothing_done, tokens), expected)
    smoothed = load_quantized(checkpoint, "float32", Recipe(formats={}, smoothed=SMOOTHED))
    assert difference(logits_of(smoothed, tokens), expected) < 2e-5
    bounds = {("int8", "float32"): 0.08, ("int8", "bfloat16"): 0.08, ("int4", "float32"): 0.5}
    for (quantization, dtype), bound in bounds.items():
        model = load_model(checkpoint, dtype, quantization=quantization)
        assert model.dtype == dtype
        got = difference(logits_of(model, tokens, kv_cache_dtype=dtype), expected)
        report(f"{model_folder.name}, {quantization} computed in {dtype}: logits differ by {got:.4f}")
        assert 1e-3 < got < bound


@pytest.mark.parametrize("name", ["llama-mqa", "llama-biases", "qwen3-tied"])
def test_the_recipe_beats_plain_rounding_of_uneven_channels(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    with torch.no_grad():
        for layer in model.model.layers:
            factors = torch.exp(1.5 * torch.randn(len(layer.mlp.up_proj.weight)))
            layer.mlp.up_proj.weight *= factors[:, None]
            layer.mlp.down_proj.weight /= factors
            if layer.mlp.up_proj.bias is not None:
                layer.mlp.up_proj.bias *= factors
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tokens = some_tokens(checkpoint.spec.vocab_size)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    recipe = RECIPES["int8"]
    plain = load_quantized(checkpoint, "float32", Recipe(formats=recipe.formats))
    whole = load_quantized(checkpoint, "float32", recipe)
    assert difference(logits_of(whole, tokens), expected) < 0.8 * difference(logits_of(plain, tokens), expected)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_memory_is_what_was_said(quantization: str, demo_model: Path, tiny_llama: Path) -> None:
    spec = open_checkpoint(demo_model).spec
    sizes = {name: weight_bytes(spec, "bfloat16", name) for name in (None, "int8", "int4")}
    assert sizes["int4"] < sizes["int8"] < sizes[None]
    checkpoint = open_checkpoint(tiny_llama)
    said = weight_bytes(checkpoint.spec, "bfloat16", quantization)
    # The tiny model's vocabulary of 300 is padded to whole panels, and norms are not counted.
    assert said <= load_model(checkpoint, "bfloat16", quantization=quantization).weight_bytes <= 1.35 * said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_tokens_do_not_depend_on_the_batch(tiny_llama: Path, quantization: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(6, 300, rng.integers(1, 90)).tolist() for _ in range(12)]
    settings: dict[str, Any] = {"model": tiny_llama, "dtype": dtype, "quantization": quantization}

    def params(index: int) -> SamplingParams:
        drawn = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        return SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, **drawn)

    results = []
    for num_threads, budget, alone in ((2, 2048, False), (1, 33, False), (1, 2048, True)):
        engine = LLMEngine(
            **settings, num_kv_blocks=128, num_threads=num_threads, max_num_batched_tokens=budget, max_num_seqs=8
        )
        assert engine.quantization == quantization
        got: dict[str, tuple[list[int], list[float]]] = {}
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params(index))
            if alone:
                got |= tokens_by_request(engine)
        results.append(got | tokens_by_request(engine))
        engine.close()
    assert len(results[0]) == len(prompts)
    assert results[0] == results[1] == results[2]


# ---- Codes of GGUF files ---------------------------------------------------------------------------------------------

CODES_BOUND = 0.08  # tests' tiny Llama has wide weights: half of what a token says is noise to the next
LLAMA_TENSORS = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in LINEAR_KINDS]


def int4_values(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    grouped = codes.float().view(len(codes), -1, 32) * scales.float()[..., None] + minimums.float()[..., None]
    return grouped.view(codes.shape)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # GGUF has the q and k rows of llama in an order of its own
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_codes_are_what_the_file_says(llama_weights: Weights, tmp_path: Path, kind: str, arch: str) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights, kind=KINDS[kind], arch=arch)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name in LLAMA_TENSORS:
        assert checkpoint.stores_int4(name)
        codes, scales, minimums = checkpoint.int4_codes(name)
        assert (codes.dtype, scales.dtype, minimums.dtype) == (torch.uint8, torch.float16, torch.float16)
        assert all(part.is_contiguous() for part in (codes, scales, minimums))
        assert int(codes.max()) == 15
        # Blocks are along the rows: which order these are in changes none of them.
        stored = dequantize(quantize(llama_weights[name].numpy(), KINDS[kind]), KINDS[kind])
        values = int4_values(codes, scales, minimums)
        assert torch.equal(values, torch.from_numpy(np.array(stored, np.float32)).view(values.shape))
        assert torch.equal(values, checkpoint.tensor(name, torch.float32))
    assert not checkpoint.stores_int4("model.norm.weight")
    assert not checkpoint.stores_int4("no.such.weight")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_codes_are_taken_as_they_are(llama_weights: Weights, tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights, kind=KINDS[kind])
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    recipe = recipe_for(checkpoint, "int4")
    assert recipe.from_codes and not recipe.smoothed
    assert recipe.rotated == ("lm_head",)
    taken = dict(quantized_weights(checkpoint, recipe, torch.bfloat16))
    assert taken.keys() == checkpoint.shapes().keys() | {"lm_head.codes"}
    for name in LLAMA_TENSORS:
        assert all(torch.equal(a, b) for a, b in zip(taken[name], checkpoint.int4_codes(name), strict=True))
    head = quantize_int8(rotate(checkpoint.tensor("lm_head.weight", torch.float32)))
    assert all(torch.equal(a, b) for a, b in zip(taken["lm_head.codes"], head, strict=True))
    tokens = some_tokens(300)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    got = logits_of(load_model(checkpoint, "float32", quantization="int4"), tokens)
    assert difference(got, expected) < CODES_BOUND  # nothing but the inputs' 8 bits is new
    assert not recipe_for(checkpoint, "int8").from_codes


def test_gguf_of_8_bits_goes_through_the_recipe(llama_weights: Weights, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights, kind=KINDS["Q8_0"])
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert not any(checkpoint.stores_int4(name) for name in LLAMA_TENSORS)
    tokens = some_tokens(300)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    for quantization, bound in (("int8", 0.08), ("int4", 0.5)):
        assert recipe_for(checkpoint, quantization) == RECIPES[quantization]
        got = logits_of(load_model(checkpoint, "float32", quantization=quantization), tokens)
        assert difference(got, expected) < bound


@pytest.mark.parametrize("odd", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight"])
def test_gguf_of_mixed_types_goes_through_the_recipe(llama_weights: Weights, tmp_path: Path, odd: str) -> None:
    rest = {name: tensor for name, tensor in llama_weights.items() if name != odd}
    array = {gguf_name(odd): llama_weights[odd].numpy()}
    write_gguf(tmp_path / "m.gguf", rest, kind=KINDS["Q4_1"], tensors=array)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert [name for name in LLAMA_TENSORS if not checkpoint.stores_int4(name)] == [odd]
    recipe = recipe_for(checkpoint, "int4")
    assert not recipe.from_codes
    assert recipe.formats == RECIPES["int4"].formats
    tokens = some_tokens(300)
    expected = logits_of(load_model(checkpoint, "float32"), tokens)
    assert difference(logits_of(load_model(checkpoint, "float32", quantization="int4"), tokens), expected) < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_that_were_in_4_bits_before_are_left_alone(
    llama_weights: Weights, tiny_llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Expanded and saved by somebody: neither smoothed nor rotated, since they lie on their grid as they are."""
    write_gguf(tmp_path / "m.gguf", llama_weights, kind=KINDS["Q4_1"])
    expanded = {name: tensor.to(dtype) for name, tensor in open_checkpoint(tmp_path / "m.gguf").tensors(torch.float32)}
    down = [name for name in LLAMA_TENSORS if name.endswith("down_proj.weight")]
    tokens = some_tokens(300)
    for fresh in ([], down):  # these have never been in 4 bits
        folder = Path(shutil.copytree(tiny_llama, tmp_path / f"folder-{len(fresh)}"))
        save_file(expanded | {name: llama_weights[name] for name in fresh}, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        recipe = recipe_for(checkpoint, "int4")
        changed = ("down",) if fresh else ()
        assert not recipe.from_codes
        assert (recipe.smoothed, recipe.rotated) == (changed, (*changed, "lm_head"))
        assert recipe_for(checkpoint, "int8") == RECIPES["int8"]
        expected = logits_of(load_model(checkpoint, "float32"), tokens)
        got = logits_of(load_model(checkpoint, "float32", quantization="int4"), tokens)
        assert difference(got, expected) < (0.3 if fresh else CODES_BOUND)


def test_other_weights_of_a_gguf_file_may_have_any_type(llama_weights: Weights, tmp_path: Path) -> None:
    """Embeddings often have more bits than the layers."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    rest = {name: tensor for name, tensor in llama_weights.items() if name not in names}
    arrays = {gguf_name(name): llama_weights[name].numpy() for name in names}
    write_gguf(tmp_path / "m.gguf", rest, kind=KINDS["Q4_0"], tensors=arrays)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert recipe_for(checkpoint, "int4").from_codes
    tokens = some_tokens(300)
    got = logits_of(load_model(checkpoint, "float32", quantization="int4"), tokens)
    assert difference(got, logits_of(load_model(checkpoint, "float32"), tokens)) < CODES_BOUND
