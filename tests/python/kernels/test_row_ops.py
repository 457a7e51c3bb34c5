"""Row-wise operators against plain torch: embedding, RMSNorm, SiLU * mul, log-softmax, argmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ops = torch.ops.steploop

COMPUTE_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LEADING = st.lists(st.integers(0, 4), min_size=0, max_size=3)
SIZES = st.one_of(st.integers(1, 200), st.sampled_from([256, 576, 577, 1536]))
SEEDS = st.integers(0, 2**31)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got, expected):
    """expected in float64; got may be rounded to bfloat16."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 0.1)


@given(num_tokens=st.integers(0, 20), vocab=st.integers(1, 50), size=SIZES, dtype=COMPUTE_DTYPES, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_embedding(num_tokens, vocab, size, dtype, seed):
    table = normal(vocab, size, seed=seed).to(dtype)
    token_ids = torch.randint(vocab, (num_tokens,), dtype=torch.int32)
    got = ops.embedding(token_ids, table)
    assert got.dtype == torch.float32
    assert torch.equal(got, table.float()[token_ids.long()])


@given(leading=LEADING, size=SIZES, out_dtype=COMPUTE_DTYPES, eps=st.sampled_from([1e-5, 1e-6, 0.1]), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_rms_norm(leading, size, out_dtype, eps, seed):
    x, weight = normal(*leading, size, seed=seed) * 3, normal(size, seed=seed + 1)
    before = x.clone()
    got = ops.rms_norm(x, weight, eps, out_dtype=out_dtype)
    assert got.shape == x.shape
    assert got.dtype == out_dtype
    assert torch.equal(x, before)
    wide = x.double()
    assert_close(got, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double())


@given(leading=LEADING, size=SIZES, out_dtype=COMPUTE_DTYPES, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_add_rms_norm(leading, size, out_dtype, seed):
    x, residual = (normal(*leading, size, seed=seed + i) for i in range(2))
    weight = normal(size, seed=seed + 2)
    total = x + residual
    got = ops.add_rms_norm(x, residual, weight, 1e-5, out_dtype=out_dtype)
    assert torch.equal(x, total)
    assert torch.equal(got, ops.rms_norm(total, weight, 1e-5, out_dtype=out_dtype))


def test_rms_norm_of_extreme_rows():
    weight = torch.ones(96)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 96), weight, 1e-5), torch.zeros(2, 96))
    for scale in (1e-15, 1e15):
        x = normal(2, 96).double() * scale
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(ops.rms_norm(x.float(), weight, 1e-5).double(), expected, rtol=1e-5, atol=0)


@given(leading=LEADING, size=SIZES, out_dtype=COMPUTE_DTYPES, scale=st.sampled_from([0.1, 2, 60]), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_silu_and_mul(leading, size, out_dtype, scale, seed):
    gate_up = normal(*leading, 2 * size, seed=seed) * scale
    got = ops.silu_and_mul(gate_up, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    gate, up = gate_up.double().split(size, dim=-1)
    assert_close(got, torch.nn.functional.silu(gate) * up)


@given(
    leading=LEADING,
    size=st.one_of(st.integers(1, 200), st.sampled_from([1000, 49_152])),
    scale=st.sampled_from([0.01, 3, 100]),
    offset=st.sampled_from([0, 1e4]),
    seed=SEEDS,
)
@settings(max_examples=40, deadline=None)
def test_log_softmax(leading, size, scale, offset, seed):
    logits = normal(*leading[:2], size, seed=seed) * scale + offset
    got = ops.log_softmax(logits)
    torch.testing.assert_close(got.double(), torch.log_softmax(logits.double(), dim=-1), rtol=2e-7, atol=1e-6)


def test_log_softmax_of_rows_with_minus_infinity_and_nan():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1.0, torch.nan, 0.0], [1.0, torch.inf, 0.0], [0.0, 0.0, -1e9]])
    got = ops.log_softmax(logits)
    torch.testing.assert_close(got[0], torch.tensor([0.5, 0.0, 0.5]).log())
    assert got[1].isnan().all()
    assert got[2].isnan().all()
    assert got[3].isfinite().all()


@given(leading=LEADING, size=st.one_of(st.integers(1, 200), st.just(49_152)), levels=st.integers(1, 5), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_argmax(leading, size, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (*leading[:2], size), generator=generator).float()
    got = ops.argmax(logits)
    assert got.dtype == torch.int64
    # The lowest of equal ones, which torch.argmax does not promise.
    assert torch.equal(got, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_argmax_marks_broken_rows():
    logits = torch.tensor([[0.0, torch.nan], [torch.inf, 1.0], [-torch.inf, -1.0]])
    assert ops.argmax(logits).tolist() == [-1, -1, 1]


@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_rows_do_not_depend_on_other_rows(num_rows):
    x, weight = normal(num_rows, 577), normal(577, seed=1)
    whole = [ops.rms_norm(x, weight, 1e-5), ops.log_softmax(x), ops.silu_and_mul(x[:, :576].contiguous())]
    for row in (0, num_rows // 2, num_rows - 1):
        one = x[row : row + 1].clone()
        alone = [ops.rms_norm(one, weight, 1e-5), ops.log_softmax(one), ops.silu_and_mul(one[:, :576].contiguous())]
        for got, expected in zip(alone, whole, strict=True):
            assert torch.equal(got[0], expected[row])
