"""Row-wise CUDA kernels against plain torch: embedding, gather, RMSNorm, SiLU * mul."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.one_of(st.integers(1, 80), st.sampled_from([129, 257, 513])).map(lambda eighth: 8 * eighth)
LEADING = st.lists(st.integers(0, 4), min_size=0, max_size=2)
SEEDS = st.integers(0, 2**31)
ORDERS = st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99))


@given(num_tokens=st.integers(0, 9), vocab=st.integers(1, 50), size=SIZES, dtype=DTYPES, seed=SEEDS, order=ORDERS)
@settings(max_examples=30, deadline=None)
def test_embedding(ops, num_tokens, vocab, size, dtype, seed, order):
    ops.emulate(*order)
    table = ops.normal(vocab, size, seed=seed, dtype=dtype)
    token_ids = ops.integers(vocab, num_tokens, seed=seed)
    got = ops.embedding(token_ids, table)
    assert got.dtype == torch.float32
    assert torch.equal(got, table.float()[token_ids.long()])


@given(num_rows=st.integers(0, 9), source_rows=st.integers(1, 30), size=SIZES, seed=SEEDS, order=ORDERS)
@settings(max_examples=20, deadline=None)
def test_gather_rows(ops, num_rows, source_rows, size, seed, order):
    ops.emulate(*order)
    x = ops.normal(source_rows, size - 4, seed=seed)
    rows = ops.integers(source_rows, num_rows, seed=seed)
    assert torch.equal(ops.gather_rows(x, rows), x[rows.long()])


def plain_rms_norm(x, weight, eps):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@given(leading=LEADING, size=SIZES, out_dtype=DTYPES, eps=st.sampled_from([1e-5, 0.1]), seed=SEEDS, order=ORDERS)
@settings(max_examples=30, deadline=None)
def test_rms_norm(ops, leading, size, out_dtype, eps, seed, order):
    ops.emulate(*order)
    x, weight = ops.normal(*leading, size, seed=seed) * 3, ops.normal(size, seed=seed + 1)
    before = x.clone()
    got = ops.rms_norm(x, weight, eps)
    assert got.dtype == torch.float32
    assert torch.equal(x, before)
    assert ops.relative_error(got, plain_rms_norm(x, weight, eps)) < 2e-6
    assert torch.equal(ops.rms_norm(x, weight, eps, out_dtype=out_dtype), got.to(out_dtype))


@given(leading=LEADING, size=SIZES, out_dtype=DTYPES, seed=SEEDS, order=ORDERS)
@settings(max_examples=30, deadline=None)
def test_add_rms_norm(ops, leading, size, out_dtype, seed, order):
    ops.emulate(*order)
    x, residual = (ops.normal(*leading, size, seed=seed + i) for i in range(2))
    weight, total = ops.normal(size, seed=seed + 2), x + residual
    got = ops.add_rms_norm(x, residual, weight, 1e-5, out_dtype=out_dtype)
    assert torch.equal(x, total)
    assert torch.equal(got, ops.rms_norm(total, weight, 1e-5, out_dtype=out_dtype))


@pytest.mark.parametrize("size", [8, 1024, 1032, 2048, 2056, 4104, 8200, 16384])
def test_rms_norm_of_every_block_size(ops, size):
    ops.emulate("reverse")
    x, weight = ops.normal(2, size), ops.normal(size, seed=1)
    assert ops.relative_error(ops.rms_norm(x, weight, 1e-5), plain_rms_norm(x, weight, 1e-5)) < 2e-6
    assert torch.equal(ops.rms_norm(torch.zeros_like(x), weight, 1e-5), torch.zeros_like(x))


@given(
    leading=LEADING,
    groups=st.integers(1, 9),
    group=st.sampled_from([0, 8, 16, 24, 64]),
    out_dtype=DTYPES,
    scale=st.sampled_from([0.1, 2, 60]),
    seed=SEEDS,
    order=ORDERS,
)
@settings(max_examples=30, deadline=None)
def test_silu_and_mul(ops, leading, groups, group, out_dtype, scale, seed, order):
    ops.emulate(*order)
    size = groups * (group or 40)
    gate_up = ops.normal(*leading, 2 * size, seed=seed) * scale
    gate, up = gate_up.double().unflatten(-1, (-1, 2, group or size)).unbind(-2)
    expected = (torch.nn.functional.silu(gate) * up).flatten(-2)
    got = ops.silu_and_mul(gate_up, group=group)
    assert got.dtype == torch.float32
    assert ops.relative_error(got, expected) < 1e-5
    assert torch.equal(ops.silu_and_mul(gate_up, out_dtype, group), got.to(out_dtype))


def test_rows_do_not_depend_on_other_rows(ops):
    ops.emulate("random", seed=3)
    x, weight = ops.normal(7, 1040), ops.normal(1040, seed=1)
    whole = ops.rms_norm(x, weight, 1e-5), ops.silu_and_mul(x)
    for row in (0, 3, 6):
        one = x[row : row + 1].clone()
        assert torch.equal(ops.rms_norm(one, weight, 1e-5)[0], whole[0][row])
        assert torch.equal(ops.silu_and_mul(one)[0], whole[1][row])
