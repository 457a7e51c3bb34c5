"""Paged attention against plain torch: prompt chunks and decodes, with whatever is not theirs poisoned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .kv_caches import KV_DTYPES, element_dtype, poisoned_cache

ops = torch.ops.steploop

HUGE_BLOCK_ID = 2**31 - 1


class Case:
    """A batch of sequences (query tokens, all tokens) with random keys and values in shuffled blocks."""

    def __init__(self, sequences, *, num_heads, num_kv_heads, head_dim, block_size, dtype, seed=0, spread=1.0):
        generator = torch.Generator().manual_seed(seed)
        self.sequences, self.scale, self.spread = sequences, head_dim**-0.5, spread
        lengths = [length for _, length in sequences]
        blocks_needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(blocks_needed) + 3
        self.cache = poisoned_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype)
        element = element_dtype(dtype)
        self.block_tables = torch.full((len(sequences), max(blocks_needed) + 2), HUGE_BLOCK_ID, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=generator).int()
        self.keys, self.values = [], []
        for row, (length, needed) in enumerate(zip(lengths, blocks_needed, strict=True)):
            blocks, free = free[:needed], free[needed:]
            self.block_tables[row, :needed] = blocks
            positions = torch.arange(length)
            slots = blocks[positions // block_size].long() * block_size + positions % block_size
            key, value = (torch.randn(length, num_kv_heads, head_dim, generator=generator) for _ in range(2))
            ops.kv_write(key.to(element), value.to(element), slots, self.cache)
            key, value = ops.kv_read(self.cache, slots)
            self.keys.append(key)
            self.values.append(value)
        num_rows = sum(count for count, _ in sequences)
        self.q = (torch.randn(num_rows, num_heads, head_dim, generator=generator) * spread).to(element)

    def run(self, sequences=None, first_rows=None, **options):
        """sequences: (index, query tokens, all tokens); by default all of them whole."""
        if sequences is None:
            sequences = [(index, count, length) for index, (count, length) in enumerate(self.sequences)]
            q = self.q
        else:
            q = torch.cat([self.q[row : row + count] for row, (_, count, _) in zip(first_rows, sequences, strict=True)])
        counts = torch.tensor([0] + [count for _, count, _ in sequences])
        return ops.paged_attention(
            q,
            self.cache,
            self.block_tables[[index for index, _, _ in sequences]].contiguous(),
            counts.cumsum(0).int(),
            torch.tensor([length for _, _, length in sequences], dtype=torch.int32),
            self.scale,
            **options,
        )

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


def assert_close(got, case):
    # A float32 score is off by some 1e-7 of what it sums, and its probability by as much of itself as that is. bfloat16
    # also rounds each probability, to 2^-9 of itself, and so the weighted mean to 2^-9 of the largest value. Beside
    # int8, queries are 16-bit numbers (each 2^-16 of the row's largest off) and so are the probabilities of a tile.
    tolerance = 2e-6 + 6e-6 * case.spread
    if case.cache.dtype == torch.int8:
        tolerance += 1e-4 + 1e-3 * case.spread
    if case.q.dtype == torch.bfloat16:
        tolerance += 2**-7
    if got.dtype == torch.bfloat16:
        tolerance += 2**-7
    torch.testing.assert_close(got.double(), case.reference(), rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.one_of(st.integers(0, 80), st.sampled_from([63, 64, 127, 511, 512, 513, 1023, 1100])))
        count = draw(st.one_of(st.just(1), st.integers(1, 70)))
        sequences.append((count, context + count))
    return Case(
        sequences,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        block_size=draw(st.sampled_from([8, 16, 32, 64])),
        dtype=draw(st.sampled_from(KV_DTYPES)),
        seed=draw(st.integers(0, 2**31)),
        spread=draw(st.sampled_from([0.1, 1.0, 8.0])),
    )


@given(case=cases(), out_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]))
@settings(max_examples=90, deadline=None)
def test_against_plain_attention(case, out_dtype):
    got = case.run(out_dtype=out_dtype)
    assert got.dtype == (out_dtype or torch.float32)
    assert_close(got, case)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_head_dim_and_block_size(dtype, head_dim, block_size):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case = Case([(1, 1), (1, 130), (17, 17), (5, 77)], **shape)
    assert_close(case.run(), case)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_row_is_the_same_bits_in_any_batch(dtype, block_size):
    case = Case(
        [(1, 700), (600, 600), (40, 1100)],
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=block_size,
        dtype=dtype,
    )
    whole = case.run()
    # Decoded one by one, rather than as part of a prompt.
    for row in (0, 1, 63, 64, 300, 511, 512, 599):
        alone = case.run([(1, 1, row + 1)], [1 + row])
        assert torch.equal(alone[0], whole[1 + row])
    # In chunks of other sizes, and in another order.
    chunks = [(2, 13, 1073), (1, 250, 250), (0, 1, 700), (1, 350, 600), (2, 27, 1100)]
    first_rows = [601, 1, 0, 251, 614]
    got = case.run(chunks, first_rows)
    row = 0
    for (_, count, _), first in zip(chunks, first_rows, strict=True):
        assert torch.equal(got[row : row + count], whole[first : first + count])
        row += count


@given(case=cases(), target_items=st.integers(1, 200), max_partial_rows=st.sampled_from([10, 1000, 100_000]))
@settings(max_examples=60, deadline=None)
def test_no_bit_depends_on_how_work_is_cut(case, target_items, max_partial_rows):
    whole = case.run()
    assert torch.equal(case.run(target_items=target_items, max_partial_rows=max_partial_rows), whole)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_long_contexts_cut_into_single_splits(dtype):
    case = Case([(1, 4001), (30, 1600)], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    whole = case.run()
    assert_close(whole, case)
    for target_items in (3, 7, 1000):
        assert torch.equal(case.run(target_items=target_items, max_partial_rows=10_000), whole)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_extreme_scores_stay_finite(dtype):
    case = Case([(3, 600)], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype, spread=1e4)
    assert_close(case.run(), case)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_stale_keys_in_the_last_block_do_not_matter(dtype):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "dtype": dtype}
    case = Case([(1, 21)], **shape)
    before = case.run()
    block = int(case.block_tables[0, 1])
    for offset in range(5, 16):
        poison = torch.full((1, 1, 64), torch.inf if offset % 2 else 1e30, dtype=element_dtype(dtype))
        ops.kv_write(poison, poison, torch.tensor([block * 16 + offset]), case.cache)
    assert torch.equal(case.run(), before)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("what", ["key", "value", "query"])
def test_what_is_not_finite_shows_in_its_rows_alone(dtype, what):
    case = Case([(1, 100), (1, 70)], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    whole = case.run()
    if what == "query":
        case.q[0, 0, 5] = torch.nan
    else:
        slot = case.block_tables[0, 2].long().view(1) * 16 + 3
        key, value = ops.kv_read(case.cache, slot)
        (key if what == "key" else value)[0, 0, 5] = torch.nan
        ops.kv_write(key, value, slot, case.cache)
    got = case.run()
    # Of int8 a key or value is lost as a whole, else a value only in its own dimension.
    spoilt = got[0, :2] if dtype == torch.int8 or what == "key" else got[0, :2, 5]
    if what == "query":
        spoilt = got[0, 0]
        assert torch.equal(got[0, 1], whole[0, 1])
    assert spoilt.isnan().all()
    assert torch.equal(got[0, 2:], whole[0, 2:])
    assert torch.equal(got[1], whole[1])
