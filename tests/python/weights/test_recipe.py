"""Quantised at load: what a recipe does to a model, GGUF codes as they are, packing, rescoring, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from steploop import EngineConfig, LLMEngine, SamplingParams
from steploop.cli import main
from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedDeviceError, UnsupportedModelError
from steploop.pack import pack_model
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

from ..engine.serving import make_engine
from .gguf_writing import gguf_name, write_gguf
from .small_models import MODELS, make_model, save_model

Weights = dict[str, torch.Tensor]
QUANTIZATIONS = list(RECIPES)
SMOOTHED = RECIPES["int8"].smoothed


def logits_of(model: Any, token_ids: list[int], **settings: Any) -> torch.Tensor:
    settings = {"kv_cache_dtype": "float32", "num_kv_blocks": 64, "num_threads": 1, **settings}
    return torch.from_numpy(make_engine(model, **settings).teacher_forced_logits(token_ids))


def some_tokens(vocab_size: int, count: int = 120) -> list[int]:
    return np.random.default_rng(1).integers(0, vocab_size, count).tolist()


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference in units of the norm of what is expected, both without each row's mean."""
    got, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (got, expected))
    return float((got - expected).norm() / expected.norm())


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


def tokens_by_request(engine: LLMEngine) -> dict[str, tuple[list[int], list[float]]]:
    results: dict[str, tuple[list[int], list[float]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            sample = output.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            results[output.request_id] = (list(sample.token_ids), logprobs)
    return results


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

KINDS = {"Q4_0": GGMLQuantizationType.Q4_0, "Q4_1": GGMLQuantizationType.Q4_1, "Q8_0": GGMLQuantizationType.Q8_0}
CODES_BOUND = 0.08  # tests' tiny Llama has wide weights: half of what a token says is noise to the next
LLAMA_TENSORS = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in LINEAR_KINDS]


@pytest.fixture(scope="module")
def llama_weights(tiny_llama: Path) -> Weights:
    return {name: tensor.clone() for name, tensor in open_checkpoint(tiny_llama).tensors(torch.float32)}


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
