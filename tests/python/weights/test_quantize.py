"""Rotation, codes of 8 and 4 bits, and the forward pass that measures the inputs of linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop.weights import open_checkpoint
from steploop.weights.calibration import NUM_TOKENS, Calibration, decoder_layer, rms_norm
from steploop.weights.quantize import INT4_GROUP, input_group, quantize_int4, quantize_int8, rotate, rotation_size

from .small_models import MODELS, make_model, save_model

SEEDS = st.integers(0, 2**31)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Rotation --------------------------------------------------------------------------------------------------------


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, made orthogonal: Kronecker powers of [[1, 1], [1, -1]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix * size**-0.5


@pytest.mark.parametrize(
    ("columns", "size"),
    [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64), (128, 64), (7, 1), (36, 4), (80, 16), (576, 64)],
)
def test_rotate_is_a_hadamard_matrix_for_each_run_of_columns(columns: int, size: int) -> None:
    assert rotation_size(columns) == size
    weight = normal(5, columns).double()
    matrix = torch.block_diag(*[hadamard(size)] * (columns // size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(columns, dtype=torch.float64))
    rotated = rotate(weight)
    assert torch.allclose(rotated, weight @ matrix, rtol=1e-12, atol=1e-12)
    assert torch.allclose(rotate(rotated), weight, rtol=1e-12, atol=1e-12)  # its own inverse


@given(rows=st.integers(1, 5), columns=st.integers(1, 300), seed=SEEDS)
@settings(max_examples=60)
def test_rotating_weights_and_inputs_changes_no_product(rows: int, columns: int, seed: int) -> None:
    weight, x = normal(rows, columns, seed=seed), normal(3, columns, seed=seed + 1)
    before = weight.clone()
    rotated = rotate(weight)
    assert torch.equal(weight, before)
    assert (rotated.shape, rotated.dtype) == (weight.shape, torch.float32)
    torch.testing.assert_close(rotate(x) @ rotated.T, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_rotate_spreads_a_single_large_value() -> None:
    weight = torch.zeros(1, 128)
    weight[0, 70] = 64.0
    rotated = rotate(weight)
    assert torch.equal(rotated[0, :64], torch.zeros(64))  # another run
    assert torch.equal(rotated[0, 64:].abs(), torch.full((64,), 8.0))


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def int8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, float64."""
    return codes.double() * scales.double().repeat_interleave(input_group(codes.shape[1]), 1)[:, : codes.shape[1]]


@given(rows=st.integers(1, 6), columns=st.integers(1, 300), spread=st.sampled_from([0.0, 1.0, 4.0]), seed=SEEDS)
@settings(max_examples=100)
def test_int8_is_within_half_a_step(rows: int, columns: int, spread: float, seed: int) -> None:
    weight = normal(rows, columns, seed=seed) * torch.exp(spread * normal(rows, columns, seed=seed + 1))
    codes, scales = quantize_int8(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    size = input_group(columns)
    assert (codes.shape, scales.shape) == (weight.shape, (rows, -(-columns // size)))
    assert codes.is_contiguous() and scales.is_contiguous()
    for group in range(scales.shape[1]):
        part = slice(group * size, (group + 1) * size)
        assert torch.equal(scales[:, group], weight[:, part].abs().amax(1) / 127)
        error = (int8_values(codes, scales)[:, part] - weight[:, part].double()).abs()
        assert bool((error <= 0.50001 * scales[:, group, None].double()).all())
    assert int(codes.int().abs().max()) == 127


def test_int8_of_zeros_and_of_extremes() -> None:
    weight = torch.zeros(3, 384)  # two groups of 192
    weight[1, :192] = 1e30
    weight[2, 192:] = -1e-25
    codes, scales = quantize_int8(weight)
    assert torch.equal(codes[0], torch.zeros(384, dtype=torch.int8)) and torch.equal(scales[0], torch.zeros(2))
    assert codes[1].tolist() == [127] * 192 + [0] * 192
    assert codes[2].tolist() == [0] * 192 + [-127] * 192
    torch.testing.assert_close(int8_values(codes, scales).float(), weight, rtol=1e-6, atol=0)


def test_int8_keeps_what_lies_on_its_grid() -> None:
    codes = torch.randint(-127, 128, (4, 570), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    codes[:, ::192] = 127
    scales = torch.tensor([[0.5, 2.0, 1.0]]).repeat(4, 1)
    again, again_scales = quantize_int8(int8_values(codes, scales).float())
    assert torch.equal(again, codes)
    assert torch.equal(again_scales, scales)


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


def int4_values(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, float64."""
    grouped = codes.double().view(len(codes), -1, INT4_GROUP)
    return (grouped * scales.double()[..., None] + minimums.double()[..., None]).view(codes.shape)


def square_errors(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of each group, [rows, groups]."""
    return (values - weight.double()).square().view(len(weight), -1, INT4_GROUP).sum(-1)


def plain_int4(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight whose codes divide each group's range, from its least to its largest, in 15 steps."""
    groups = weight.double().view(len(weight), -1, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = (high - low).clamp(min=1e-30) / 15
    codes = ((groups - low) / steps).round()
    return (codes * steps.half().double() + low.half().double()).view(weight.shape)


def check_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, minimums = quantize_int4(weight)
    groups = (len(weight), weight.shape[1] // INT4_GROUP)
    assert (codes.dtype, scales.dtype, minimums.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert (codes.shape, scales.shape, minimums.shape) == (weight.shape, groups, groups)
    assert all(part.is_contiguous() for part in (codes, scales, minimums))
    assert int(codes.max()) <= 15
    assert bool(scales.isfinite().all()) and bool(minimums.isfinite().all())
    return codes, scales, minimums


@given(
    rows=st.integers(1, 8),
    groups=st.integers(1, 6),
    size=st.sampled_from([1e-3, 0.02, 1.0, 50.0]),
    heavy=st.sampled_from([0.0, 1.0]),
    seed=SEEDS,
)
@settings(max_examples=100)
def test_int4_is_no_worse_than_dividing_the_range(rows: int, groups: int, size: float, heavy: float, seed: int) -> None:
    weight = normal(rows, groups * INT4_GROUP, seed=seed) * size
    weight *= torch.exp(heavy * normal(*weight.shape, seed=seed + 1))
    errors = square_errors(int4_values(*check_int4(weight)), weight)
    plain = square_errors(plain_int4(weight), weight)
    # Scales and minimums are rounded to float16 after they are fitted.
    assert bool((errors <= plain * 1.02 + 1e-14).all())


def test_int4_is_better_than_dividing_the_range() -> None:
    weight = normal(200, 320)
    errors = square_errors(int4_values(*quantize_int4(weight)), weight).sum()
    assert float(errors) < 0.9 * float(square_errors(plain_int4(weight), weight).sum())


@given(scale_exponent=st.integers(-8, 3), minimum=st.integers(-32, 16), seed=SEEDS)
@settings(max_examples=60)
def test_int4_keeps_what_lies_on_a_grid(scale_exponent: int, minimum: int, seed: int) -> None:
    """The weights of a model that was in 4 bits before: both ends of each group's range are used."""
    codes = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = torch.full((5, 2), 2.0**scale_exponent).half()
    weight = int4_values(codes, scales, scales * minimum)
    again = check_int4(weight.float())
    assert torch.equal(again[0], codes)
    assert torch.equal(int4_values(*again), weight)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-3, 1000.0])
def test_int4_of_groups_of_one_value(value: float) -> None:
    weight = torch.full((2, 64), value)
    values = int4_values(*check_int4(weight)).float()
    assert bool((values == values[0, 0]).all())
    torch.testing.assert_close(values, weight, rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e4])
def test_int4_of_very_small_and_very_large_values(size: float) -> None:
    """Float16 scales end at 6e-8 and 65,504: what is smaller is lost, no more than its size."""
    weight = normal(3, 96) * size
    values = int4_values(*check_int4(weight))
    steps = (weight.view(3, 3, 32).amax(-1) - weight.view(3, 3, 32).amin(-1)) / 15
    bound = (0.8 * steps + 1e-6).repeat_interleave(32, 1).double()
    assert bool(((values - weight.double()).abs() <= bound).all())


def test_int4_takes_views_and_leaves_them_alone() -> None:
    whole = normal(64, 8)
    before = whole.clone()
    transposed = check_int4(whole.T)
    assert all(torch.equal(a, b) for a, b in zip(transposed, quantize_int4(whole.T.contiguous()), strict=True))
    assert torch.equal(whole, before)


# ---- What linear layers are given ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_decoder_layer_equals_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_model(tmp_path, name))
    spec, weights = checkpoint.spec, dict(checkpoint.tensors(torch.float32))
    tokens = torch.randint(spec.vocab_size, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = make_model(name)(tokens, output_hidden_states=True).hidden_states
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        layer = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        x = decoder_layer(spec, layer, states[index][0], lambda _, x, w, b: torch.nn.functional.linear(x, w, b))
        if index == spec.num_layers - 1:  # transformers gives the last one normed
            x = rms_norm(x, weights["model.norm.weight"], spec.rms_norm_eps)
        torch.testing.assert_close(x, states[index + 1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_calibration_measures_the_inputs_of_every_linear_layer(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_model(tmp_path, name))
    spec, weights = checkpoint.spec, dict(checkpoint.tensors(torch.float32))
    tokens = torch.randint(spec.vocab_size, (256,), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, torch.Tensor] = {}

    def remember(key: str) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            inputs[key] = arguments[0][0]

        return hook

    model = make_model(name)
    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(remember(key))
    with torch.no_grad():
        model(tokens[None])
    assert spec.max_position_embeddings < NUM_TOKENS  # the text ends where the model does
    calibration = Calibration(spec, weights["model.embed_tokens.weight"])
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        layer = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
        magnitudes = calibration.next_layer(layer)
        assert magnitudes.keys() == {key.removesuffix(".weight") for key in layer if key.endswith("proj.weight")}
        for key, magnitude in magnitudes.items():
            expected = inputs[prefix + key].square().mean(0).sqrt()
            torch.testing.assert_close(magnitude, expected, rtol=1e-4, atol=1e-5)
