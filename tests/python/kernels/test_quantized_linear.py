"""Linear layers with 8-bit and 4-bit weights against plain torch on the same codes, on every instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop.weights.quantize import input_group, rotate

ops = torch.ops.steploop

ROWS = st.one_of(st.integers(0, 40), st.sampled_from([112, 113, 255, 256, 300]))
OUT_FEATURES = st.one_of(st.integers(1, 200), st.sampled_from([256, 320]))
GROUPS = st.one_of(st.integers(1, 12), st.sampled_from([18, 48, 128]))  # of 32 in_features
SIZES = st.one_of(st.integers(1, 400), st.integers(1, 30).map(lambda runs: 64 * runs))
SEEDS = st.integers(0, 2**31)
KINDS = st.sampled_from(["int8", "int4"])


def group_of(kind, columns):
    return input_group(columns, int4=kind == "int4")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def quantized_weight(kind, rows, columns, seed=0):
    """Arguments of pack_quantized_linear (codes, scales, minimums) and the weight they stand for, float64."""
    random = generator(seed)
    if kind == "int8":
        codes = torch.randint(-127, 128, (rows, columns), generator=random, dtype=torch.int8)
        group_size = group_of(kind, columns)
        scales = torch.rand(rows, -(-columns // group_size), generator=random) + 0.1
        return (codes, scales, None), codes.double() * spread(scales, group_size, columns)
    codes = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 32, generator=random) + 0.1).half()
    minimums = (torch.randn(rows, columns // 32, generator=random) * 8).half()
    grouped = codes.double().view(rows, -1, 32) * scales.double()[..., None] + minimums.double()[..., None]
    return (codes, scales, minimums), grouped.view(rows, columns)


def spread(scales, group_size, columns):
    """The scale of each column, float64."""
    return scales.double().repeat_interleave(group_size, -1)[..., :columns]


def dequantized(x, kind, *, turn=False):
    codes, scales = ops.quantize_rows(x, kind == "int4", turn)
    return codes.double() * spread(scales, group_of(kind, x.shape[-1]), x.shape[-1])


def assert_close(got, x, weight, *terms, kind, turn=False):
    """Within the rounding of a float32 sum of what the codes stand for."""
    wide = dequantized(x, kind, turn=turn)
    expected, bound = wide @ weight.T, wide.abs() @ weight.abs().T
    for term in terms:
        expected, bound = expected + term.double(), bound + term.double().abs()
    assert got.shape == expected.shape
    assert ((got.double() - expected).abs() <= 2e-6 * bound + 1e-30).all()


def largest_of_groups(x, group_size):
    rows, size = x.shape
    padded = torch.nn.functional.pad(x, (0, -size % group_size))
    return padded.view(rows, -1, group_size).abs().amax(-1) if rows else x.new_empty(0, -(-size // group_size))


@given(rows=st.integers(0, 20), size=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]),
       kind=KINDS, seed=SEEDS)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_quantize_rows(rows, size, dtype, kind, seed):
    group_size = group_of(kind, size)
    x = (normal(rows, size, seed=seed) * torch.exp(4 * normal(rows, 1, seed=seed + 1))).to(dtype)
    codes, scales = ops.quantize_rows(x, kind == "int4")
    assert torch.equal(scales, largest_of_groups(x.float(), group_size) / 127)
    assert (codes.int().abs() <= 127).all()
    steps = spread(scales, group_size, size)
    assert ((codes.double() * steps - x.double()).abs() <= 0.5001 * steps).all()


@pytest.mark.parametrize("size", [1, 2, 6, 12, 24, 48, 80, 96, 192, 576, 1536, 3072])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_rotated_rows(size, kind, dtype):
    x = normal(9, size, seed=size)
    x[3, size // 2] = 1000
    x[5] = 0
    x = x.to(dtype)
    group_size = group_of(kind, size)
    codes, scales = ops.quantize_rows(x, kind == "int4", True)
    expected = rotate(x.double())
    steps = spread(largest_of_groups(expected, group_size) / 127, group_size, size)
    torch.testing.assert_close(spread(scales, group_size, size), steps, rtol=1e-5, atol=0)
    error = (codes.double() * spread(scales, group_size, size) - expected).abs()
    assert (error <= 0.501 * steps + 1e-5 * expected.abs()).all()


def test_groups_of_zeros_and_groups_that_are_not_finite():
    x = normal(6, 512)  # two groups
    x[1] = 0
    x[2, 300] = torch.nan
    x[3, 0] = torch.inf
    x[4] = 1e-35
    codes, scales = ops.quantize_rows(x)
    assert scales.isnan().tolist() == [[row == 3, row == 2] for row in range(6)]
    assert (codes[[1, 4]] == 0).all() and (codes[2, 256:] == 0).all() and (codes[3, :256] == 0).all()
    assert (scales[[1, 4]] == 0).all()
    for kind in ("int8", "int4"):
        arguments, _ = quantized_weight(kind, 40, 512)
        out = ops.linear(x, ops.pack_quantized_linear(*arguments), 40)
        assert out.isnan().any(-1).tolist() == [row in (2, 3) for row in range(6)]
        assert (out[[1, 4]] == 0).all()


@given(rows=ROWS, out_features=OUT_FEATURES, groups=GROUPS, odd=st.integers(0, 15), kind=KINDS,
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), with_bias=st.booleans(), turn=st.booleans(),
       seed=SEEDS)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_linear(rows, out_features, groups, odd, kind, dtype, with_bias, turn, seed):
    in_features = groups * 32 + (2 * odd if kind == "int8" else 0)
    x = normal(rows, in_features, seed=seed).to(dtype)
    arguments, weight = quantized_weight(kind, out_features, in_features, seed=seed + 1)
    bias = normal(out_features, seed=seed + 2) * 100 if with_bias else None
    got = ops.linear(x, ops.pack_quantized_linear(*arguments, bias), out_features, turn)
    assert got.dtype == torch.float32
    assert_close(got, x, weight, *([bias] if with_bias else []), kind=kind, turn=turn)


@given(rows=ROWS, out_features=OUT_FEATURES, groups=GROUPS, kind=KINDS, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_add_linear(rows, out_features, groups, kind, seed):
    x = normal(rows, groups * 32, seed=seed)
    arguments, weight = quantized_weight(kind, out_features, groups * 32, seed=seed + 1)
    out = normal(rows, out_features, seed=seed + 3) * 10
    base = out.clone()
    ops.add_linear(out, x, ops.pack_quantized_linear(*arguments))
    assert_close(out, x, weight, base, kind=kind)


@given(rows=ROWS, size=OUT_FEATURES, groups=GROUPS, kind=KINDS, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_linear_silu_and_mul(rows, size, groups, kind, seed):
    arguments, weight = quantized_weight(kind, 2 * size, groups * 32, seed=seed + 1)
    x = normal(rows, groups * 32, seed=seed) / float(weight.abs().max()) / (groups * 32) ** 0.5
    got = ops.linear_silu_and_mul(x, ops.pack_quantized_linear(*arguments, gate_up=True), size)
    product = dequantized(x, kind) @ weight.T
    expected = torch.nn.functional.silu(product[:, :size]) * product[:, size:]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_do_not_depend_on_other_rows(kind):
    columns = 576
    linear = ops.pack_quantized_linear(*quantized_weight(kind, 100, columns)[0], normal(100, seed=1))
    gate_up = ops.pack_quantized_linear(*quantized_weight(kind, 200, columns, seed=2)[0], gate_up=True)
    x = normal(300, columns, seed=4)
    expected = ops.linear(x, linear, 100), ops.linear_silu_and_mul(x, gate_up, 100)
    for num_rows in (1, 2, 3, 5, 7, 8, 14, 15, 29, 57, 113, 256):
        for first in (0, 300 - num_rows):
            part = x[first : first + num_rows].clone()
            assert torch.equal(ops.linear(part, linear, 100), expected[0][first : first + num_rows])
            assert torch.equal(ops.linear_silu_and_mul(part, gate_up, 100), expected[1][first : first + num_rows])


def test_integer_sums_are_exact_at_the_largest_codes():
    columns = 4096
    for sign in (1, -1):
        codes = torch.full((33, columns), sign * 127, dtype=torch.int8)
        packed = ops.pack_quantized_linear(codes, torch.ones(33, columns // 256))
        assert torch.equal(ops.linear(torch.full((3, columns), 127.0), packed, 33),
                           torch.full((3, 33), float(sign * 127 * 127 * columns)))  # fmt: skip


def test_bad_quantized_weights():
    codes = torch.zeros(4, 48, dtype=torch.int8)
    for arguments, message in (
        ((codes, torch.ones(5, 1)), "scales must have size 4 in dimension 0, got 5"),
        ((codes, torch.ones(4, 2)), "scales must have size 1 in dimension 1, got 2"),
        ((codes.float(), torch.ones(4, 1)), "codes must be int8"),
        ((codes.byte(), torch.ones(4, 1).half(), torch.ones(4, 1).half()), "a multiple of 32 columns, got 48"),
        ((codes[:, :47].contiguous(), torch.ones(4, 1)), "an even number of columns, got 4 and 47"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.pack_quantized_linear(*arguments)
    with pytest.raises(RuntimeError, match="gate and up must have the same rows"):
        ops.pack_quantized_linear(codes[:3].contiguous(), torch.ones(3, 1), gate_up=True)
    with pytest.raises(RuntimeError, match="x must be float32 or bfloat16, got float16"):
        ops.linear(torch.zeros(2, 48).half(), ops.pack_quantized_linear(codes, torch.ones(4, 1)), 4)
    with pytest.raises(RuntimeError, match="x must be float32 or bfloat16"):
        ops.quantize_rows(torch.zeros(2, 48).half())
