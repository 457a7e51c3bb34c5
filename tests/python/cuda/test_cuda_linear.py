"""The CUDA GEMM with every epilogue, and torch's own product as the engine calls it, against plain torch."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
# Each with another choice of tiles: at most 16, at most 64, more.
ROWS = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 130]))
OUT_FEATURES = st.one_of(st.integers(1, 100), st.sampled_from([128, 200]))
IN_FEATURES = st.one_of(st.integers(1, 20), st.sampled_from([33, 48])).map(lambda eighth: 8 * eighth)
SEEDS = st.integers(0, 2**31)
ORDERS = st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99), st.booleans())
STORE, ADD, SILU_MUL = 0, 1, 2


def assert_close(got, x, weight, bias=None, base=None):
    """Within the rounding of a float32 sum of these terms, in whatever order."""
    expected = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T
    for term in (bias, base):
        if term is not None:
            expected, bound = expected + term.double(), bound + term.double().abs()
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= 1e-5 * bound + 1e-30).all()


def make(ops, rows, out_features, in_features, dtype, with_bias, seed):
    x = ops.normal(rows, in_features, seed=seed, dtype=dtype)
    weight = ops.normal(out_features, in_features, seed=seed + 1, dtype=dtype)
    return x, weight, ops.normal(out_features, seed=seed + 2) if with_bias else None


@given(
    rows=ROWS,
    out_features=OUT_FEATURES,
    in_features=IN_FEATURES,
    dtype=DTYPES,
    with_bias=st.booleans(),
    seed=SEEDS,
    order=ORDERS,
)
@settings(max_examples=30, deadline=None)
def test_linear_and_add_linear(ops, rows, out_features, in_features, dtype, with_bias, seed, order):
    ops.emulate(*order)
    x, weight, bias = make(ops, rows, out_features, in_features, dtype, with_bias, seed)
    assert_close(ops.linear(x, weight, bias), x, weight, bias)
    out = ops.normal(rows, out_features, seed=seed + 3) * 10
    base = out.clone()
    assert ops.add_linear(out, x, weight, bias) is None
    assert_close(out, x, weight, bias, base)


def interleaved(gate, up):
    """Rows as the kernel wants them: 8 of gate, 8 of up, and so on."""
    return torch.stack([gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))], dim=1).flatten(0, 2)


@given(
    rows=ROWS,
    size=OUT_FEATURES.map(lambda size: 8 * -(-size // 8)),
    in_features=IN_FEATURES,
    dtype=DTYPES,
    seed=SEEDS,
    order=ORDERS,
)
@settings(max_examples=20, deadline=None)
def test_linear_silu_and_mul(ops, rows, size, in_features, dtype, seed, order):
    ops.emulate(*order)
    x = (ops.normal(rows, in_features, seed=seed) / in_features**0.5).to(dtype)
    gate, up = (ops.normal(size, in_features, seed=seed + i, dtype=dtype) for i in (1, 2))
    got = ops.linear_silu_and_mul(x, interleaved(gate, up))
    assert got.dtype == dtype
    wide = x.double()
    expected = torch.nn.functional.silu(wide @ gate.double().T) * (wide @ up.double().T)
    assert ops.relative_error(got, expected) < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_other_rows_nor_on_tiles(ops, dtype):
    """130 rows and few columns take one shape of tiles, the same rows alone others, and so do many columns."""
    ops.emulate("random", seed=1)
    x, weight, bias = make(ops, 130, 72, 328, dtype, True, seed=0)
    gate_up = ops.normal(64, 328, seed=9, dtype=dtype)
    expected = ops.linear(x, weight, bias), ops.linear_silu_and_mul(x, gate_up)
    for num_rows in (1, 16, 17, 64, 65):
        for first in (0, 130 - num_rows):
            part = x[first : first + num_rows].clone()
            assert torch.equal(ops.linear(part, weight, bias), expected[0][first : first + num_rows])
            assert torch.equal(ops.linear_silu_and_mul(part, gate_up), expected[1][first : first + num_rows])


def test_wide_weights_take_other_tiles_for_the_same_bits(ops):
    """From 8192 columns on 16 rows take wider tiles, and from 16384 on more than 64 rows take the largest."""
    ops.emulate("forward")
    x, weight, bias = make(ops, 66, 16_392, 136, torch.bfloat16, True, seed=0)
    whole = ops.linear(x, weight, bias)
    assert_close(whole, x, weight, bias)
    assert torch.equal(ops.linear(x[:20].clone(), weight, bias), whole[:20])
    assert torch.equal(ops.linear(x[:3].clone(), weight, bias), whole[:3])
    assert torch.equal(ops.linear(x, weight[:40].clone(), bias[:40].clone()), whole[:, :40])


def test_leading_dimensions_are_rows(ops):
    ops.emulate("forward")
    x, weight, _ = make(ops, 6, 40, 64, torch.bfloat16, False, seed=0)
    got = ops.linear(x.view(2, 3, 64), weight)
    assert got.shape == (2, 3, 40)
    assert torch.equal(got.view(6, 40), ops.linear(x, weight))
    assert torch.equal(ops.linear(x[0].clone(), weight), got[0, 0])


# ---- Another library's product ---------------------------------------------------------------------------------------


@given(rows=st.integers(0, 9), size=st.integers(1, 150), dtype=DTYPES, with_bias=st.booleans(), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_linear_epilogue(ops, rows, size, dtype, with_bias, seed):
    ops.emulate("reverse")
    product, bias = ops.normal(rows, size, seed=seed, dtype=dtype), ops.normal(size, seed=seed + 1)
    bias = bias if with_bias else None
    stored = product.float() + bias if with_bias else product.float()
    out = torch.full_like(stored, torch.nan)
    ops.linear_epilogue(product, bias, out, STORE)
    assert torch.equal(out, stored)
    base = ops.normal(rows, size, seed=seed + 2)
    out = base.clone()
    ops.linear_epilogue(product, bias, out, ADD)
    torch.testing.assert_close(out, base + stored, rtol=1e-6, atol=1e-6)

    gate, up = (ops.normal(8 * size, rows, seed=seed + i, dtype=dtype) for i in (3, 4))
    product = interleaved(gate, up).T.contiguous()
    bias = ops.normal(16 * size, seed=seed + 5) if with_bias else torch.zeros(16 * size, device=ops.device)
    gate, up = (product.double() + bias.double()).unflatten(-1, (-1, 2, 8)).unbind(-2)
    out = torch.full((rows, 8 * size), torch.nan, dtype=dtype, device=ops.device)
    ops.linear_epilogue(product, bias if with_bias else None, out, SILU_MUL)
    expected = (torch.nn.functional.silu(gate) * up).flatten(-2)
    assert ops.relative_error(out, expected) < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_torch_product_as_a_c_function(ops, dtype, code):
    matmul = ctypes.CFUNCTYPE(ctypes.c_char_p, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3, ctypes.c_uint8)(
        ops.matmul_address()
    )
    x, weight, _ = make(ops, 5, 24, 40, dtype, False, seed=0)
    out = torch.full((5, 24), torch.nan, dtype=dtype, device=ops.device)
    for _ in range(3):
        assert matmul(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 5, 24, 40, code) is None
    assert ops.relative_error(out, x.double() @ weight.double().T) < 5e-3
    # A refusal is a number, not an exception: the caller is not Python.
    assert matmul(x.data_ptr(), weight.data_ptr(), out.data_ptr(), -5, 24, 40, code) == b"a size is negative"
