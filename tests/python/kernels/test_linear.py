"""Packed linear layers against plain torch, with every epilogue."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ops = torch.ops.steploop

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = st.one_of(st.integers(0, 40), st.sampled_from([112, 113, 255, 256, 300]))
OUT_FEATURES = st.one_of(st.integers(1, 200), st.sampled_from([256, 320]))
IN_FEATURES = st.one_of(st.integers(1, 100).map(lambda half: 2 * half), st.sampled_from([576, 770]))
SEEDS = st.integers(0, 2**31)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got, x, weight, bias=None, base=None):
    """Within the rounding of a float32 sum of these terms, in whatever order."""
    expected = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T
    for term in (bias, base):
        if term is not None:
            expected, bound = expected + term.double(), bound + term.double().abs()
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= 2e-6 * bound + 1e-30).all()


@given(rows=ROWS, out_features=OUT_FEATURES, in_features=IN_FEATURES, dtype=DTYPES, with_bias=st.booleans(), seed=SEEDS)
@settings(max_examples=80, deadline=None)
def test_linear(rows, out_features, in_features, dtype, with_bias, seed):
    x = normal(rows, in_features, seed=seed).to(dtype)
    weight = normal(out_features, in_features, seed=seed + 1).to(dtype)
    bias = normal(out_features, seed=seed + 2) if with_bias else None
    got = ops.linear(x, ops.pack_linear(weight, bias), out_features)
    assert got.dtype == torch.float32
    assert_close(got, x, weight, bias)


@given(rows=ROWS, out_features=OUT_FEATURES, in_features=IN_FEATURES, dtype=DTYPES, with_bias=st.booleans(), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_add_linear(rows, out_features, in_features, dtype, with_bias, seed):
    x = normal(rows, in_features, seed=seed).to(dtype)
    weight = normal(out_features, in_features, seed=seed + 1).to(dtype)
    bias = normal(out_features, seed=seed + 2) if with_bias else None
    out = normal(rows, out_features, seed=seed + 3) * 10
    base = out.clone()
    assert ops.add_linear(out, x, ops.pack_linear(weight, bias)) is None
    assert_close(out, x, weight, bias, base)


@given(rows=ROWS, size=OUT_FEATURES, in_features=IN_FEATURES, dtype=DTYPES, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_linear_silu_and_mul(rows, size, in_features, dtype, seed):
    x = (normal(rows, in_features, seed=seed) / in_features**0.5).to(dtype)
    gate, up = (normal(size, in_features, seed=seed + i).to(dtype) for i in (1, 2))
    got = ops.linear_silu_and_mul(x, ops.pack_gate_up(gate, up), size)
    assert got.dtype == dtype
    wide = x.double()
    expected = torch.nn.functional.silu(wide @ gate.double().T) * (wide @ up.double().T)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_other_rows(dtype):
    weight = ops.pack_linear(normal(100, 578).to(dtype), normal(100, seed=1))
    gate_up = ops.pack_gate_up(normal(100, 578, seed=2).to(dtype), normal(100, 578, seed=3).to(dtype))
    x = normal(300, 578, seed=4).to(dtype)
    expected = ops.linear(x, weight, 100), ops.linear_silu_and_mul(x, gate_up, 100)
    for num_rows in (1, 2, 5, 8, 14, 15, 29, 57, 113, 256):
        for first in (0, 300 - num_rows):
            part = x[first : first + num_rows].clone()
            assert torch.equal(ops.linear(part, weight, 100), expected[0][first : first + num_rows])
            assert torch.equal(ops.linear_silu_and_mul(part, gate_up, 100), expected[1][first : first + num_rows])


def test_leading_dimensions_are_rows():
    x, weight = normal(2, 3, 64), normal(40, 64, seed=1)
    packed = ops.pack_linear(weight)
    got = ops.linear(x, packed, 40)
    assert got.shape == (2, 3, 40)
    assert torch.equal(got.view(6, 40), ops.linear(x.view(6, 64), packed, 40))
    assert torch.equal(ops.linear(x[0, 0].contiguous(), packed, 40), got[0, 0])


def test_packed_weight_lives_as_long_as_its_tensor():
    x, weight = normal(3, 64), normal(40, 64, seed=1)
    packed = ops.pack_linear(weight)
    expected = ops.linear(x, packed, 40)
    for _ in range(50):
        ops.pack_linear(normal(40, 64, seed=2))
    other_name = packed[:]
    del packed
    assert torch.equal(ops.linear(x, other_name, 40), expected)
    with pytest.raises(
        RuntimeError, match="packed must be the tensor that pack_linear or pack_quantized_linear returned"
    ):
        ops.linear(x, other_name.clone(), 40)
