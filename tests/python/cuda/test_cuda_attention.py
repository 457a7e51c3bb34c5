"""Paged attention on CUDA against plain torch: prompt chunks and decodes, with whatever is not theirs poisoned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HUGE_BLOCK_ID = 2**31 - 1
DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
ORDERS = st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99), st.booleans())
# Where rounding to 16 bits of probabilities and of results leaves the whole.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


class Case:
    """A batch of sequences (query tokens, all tokens) with random keys and values in shuffled blocks."""

    def __init__(self, ops, sequences, *, num_heads, num_kv_heads, head_dim, block_size, dtype, seed=0, spread=1.0):
        generator = torch.Generator().manual_seed(seed)
        self.ops, self.sequences, self.scale = ops, sequences, head_dim**-0.5
        blocks_needed = [-(-length // block_size) for _, length in sequences]
        num_blocks = sum(blocks_needed) + 3
        cache = torch.full((num_blocks, num_kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
        self.block_tables = torch.full((len(sequences), max(blocks_needed) + 2), HUGE_BLOCK_ID, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=generator).int()
        self.keys, self.values = [], []
        for row, ((_, length), needed) in enumerate(zip(sequences, blocks_needed, strict=True)):
            blocks, free = free[:needed], free[needed:]
            self.block_tables[row, :needed] = blocks
            positions = torch.arange(length)
            key, value = (torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
            places = blocks[positions // block_size].long(), positions % block_size
            cache[places[0], :, 0, places[1]] = key
            cache[places[0], :, 1, places[1]] = value
            self.keys.append(key)
            self.values.append(value)
        num_rows = sum(count for count, _ in sequences)
        self.q = (torch.randn(num_rows, num_heads, head_dim, generator=generator) * spread).to(dtype)
        self.cache = cache.to(ops.device)

    def run(self, sequences=None, first_rows=None, **plan):
        """sequences: (index, query tokens, all tokens); by default all of them whole."""
        if sequences is None:
            sequences = [(index, count, length) for index, (count, length) in enumerate(self.sequences)]
            q = self.q
        else:
            q = torch.cat([self.q[row : row + count] for row, (_, count, _) in zip(first_rows, sequences, strict=True)])
        starts = torch.tensor([0] + [count for _, count, _ in sequences]).cumsum(0).int()
        lengths = torch.tensor([length for _, _, length in sequences], dtype=torch.int32)
        tables = self.block_tables[[index for index, _, _ in sequences]].contiguous()
        device = self.ops.device
        out = self.ops.paged_attention(q.to(device), self.cache, tables.to(device), starts, lengths, self.scale, **plan)
        assert out.dtype == self.q.dtype
        return out.cpu()

    def reference(self):
        rows, out = 0, []
        for (count, length), key, value in zip(self.sequences, self.keys, self.values, strict=True):
            heads_per_kv = self.q.shape[1] // key.shape[1]
            q = self.q[rows : rows + count].double().transpose(0, 1)
            k, v = (x.double().transpose(0, 1).repeat_interleave(heads_per_kv, 0) for x in (key, value))
            later = torch.arange(length) > torch.arange(length - count, length)[:, None]
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(later, -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1))
            rows += count
        return torch.cat(out)

    def check(self, got):
        expected = self.reference()
        # Row by row: one that is wrong shall not hide among others.
        norm = expected.flatten(1).norm(dim=1)
        error = (got.double() - expected).flatten(1).norm(dim=1) / norm
        assert (error < TOLERANCE[self.q.dtype]).all(), error.max()


@st.composite
def sequences(draw, max_length=700, max_count=40):
    def sequence():
        length = draw(st.one_of(st.integers(1, 130), st.sampled_from([511, 512, 513, 575, max_length])))
        return min(draw(st.one_of(st.just(1), st.integers(1, max_count))), length), length

    return [sequence() for _ in range(draw(st.integers(1, 3)))]


@st.composite
def shapes(draw):
    num_kv_heads = draw(st.sampled_from([1, 2]))
    return {
        "num_heads": num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([64, 96, 128, 256])),
        "block_size": draw(st.sampled_from([8, 16, 32, 64])),
        "dtype": draw(DTYPES),
        "seed": draw(st.integers(0, 2**31)),
        "spread": draw(st.sampled_from([0.1, 1.0, 8.0])),
    }


PLANS = st.one_of(
    st.just({}),
    st.just({"small_rows": 0}),
    st.builds(dict, target_items=st.integers(1, 8), max_partial_rows=st.sampled_from([7, 200, 10_000])),
)


@given(sequences=sequences(), shape=shapes(), plan=PLANS, order=ORDERS)
@settings(max_examples=40, deadline=None)
def test_against_plain_attention(ops, sequences, shape, plan, order):
    ops.emulate(*order)
    case = Case(ops, sequences, **shape)
    case.check(case.run(**plan))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_instance(ops, head_dim, dtype):
    ops.emulate("random", seed=head_dim, eager_copies=dtype == torch.float16)
    case = Case(
        ops,
        [(1, 1), (1, 100), (17, 17), (9, 77)],
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
    )
    case.check(case.run())
    case.check(case.run(small_rows=0))


@given(
    length=st.one_of(st.integers(70, 300), st.sampled_from([513, 577, 700])),
    shape=shapes(),
    back=st.integers(0, 63),
    order=ORDERS,
)
@settings(max_examples=20, deadline=None)
def test_a_row_is_the_same_bits_in_any_batch(ops, length, shape, back, order):
    ops.emulate(*order)
    case = Case(ops, [(1, 90), (64, length)], **shape)
    whole = case.run()
    case.check(whole)
    row = 1 + 63 - back
    position = length - back
    expected = whole[row]
    # Decoded alone and beside others, as a chunk of one token, cut along the keys, and in chunks of other sizes.
    cut = {"target_items": 64, "max_partial_rows": 10_000}
    for plan in ({}, {"small_rows": 0}, cut, {"small_rows": 0, **cut}):
        assert torch.equal(case.run([(1, 1, position)], [row], **plan)[0], expected)
    assert torch.equal(case.run([(1, 1, position), (0, 1, 90)], [row, 0])[0], expected)
    for before in (1, 7):
        first = max(1, row - before)
        got = case.run([(1, row - first + 1, position)], [first], **cut)
        assert torch.equal(got, whole[first : row + 1])
    assert torch.equal(case.run(**cut), whole)


def test_one_call_does_not_disturb_the_next(ops):
    ops.emulate("forward")
    case = Case(ops, [(3, 600)], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    before = case.run()
    case.run(target_items=8, max_partial_rows=100)
    assert torch.equal(case.run(), before)


def test_no_query_tokens(ops):
    case = Case(ops, [(1, 20)], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert case.run([(0, 0, 20)], [0]).shape == (0, 2, 64)
    got = case.run([(0, 0, 20), (0, 1, 20)], [0, 0])
    assert torch.equal(got, case.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extreme_scores_stay_finite(ops, dtype):
    ops.emulate("reverse")
    case = Case(ops, [(3, 600)], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, spread=1e3)
    case.check(case.run())


@pytest.mark.parametrize("eager_copies", [False, True])
def test_stale_keys_in_the_last_block_do_not_matter(ops, eager_copies):
    ops.emulate("random", eager_copies=eager_copies)
    case = Case(ops, [(1, 21)], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    before = case.run()
    block = int(case.block_tables[0, 1])
    for offset in range(5, 16):
        case.cache[block, :, :, offset] = torch.inf if offset % 2 else 1e30
    assert torch.equal(case.run(), before)
    assert torch.equal(case.run(small_rows=0), before)
