"""Rotary embedding, optional QK-norm and the write to the paged cache, against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop.ops import new_kv_cache

ops = torch.ops.steploop

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
HEAD_DIMS = st.sampled_from([64, 80, 96, 128, 256])
BLOCK_SIZES = st.sampled_from([8, 16, 32, 64])
HEADS = st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (6, 2)])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation_tables(num_positions, head_dim, theta=10_000.0):
    angles = torch.outer(torch.arange(num_positions).float(), theta ** (-torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos(), angles.sin()


def norm(x, weight, eps=1e-6):
    if weight is None:
        return x.double()
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def rotate(x, cos, sin):
    """x: [tokens, heads, head_dim]; the pairs are (i, i + head_dim / 2)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def poisoned_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype):
    return new_kv_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype).fill_(torch.nan)


def random_slots(num_tokens, num_blocks, block_size, seed):
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].contiguous()


@given(
    num_tokens=st.integers(0, 20),
    heads=HEADS,
    head_dim=HEAD_DIMS,
    block_size=BLOCK_SIZES,
    dtype=DTYPES,
    with_norm=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_rope_kv_write(num_tokens, heads, head_dim, block_size, dtype, with_norm, seed):
    num_heads, num_kv_heads = heads
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=seed)
    q_norm, k_norm = (normal(head_dim, seed=seed + i) if with_norm else None for i in (1, 2))
    positions = torch.randint(100, (num_tokens,), dtype=torch.int32)
    slots = random_slots(num_tokens, 5, block_size, seed)
    cache = poisoned_cache(5, num_kv_heads, block_size, head_dim, dtype)
    cos, sin = rotation_tables(100, head_dim)

    q = ops.rope_kv_write(qkv, positions, cos, sin, slots, cache, num_heads, q_norm, k_norm, 1e-6)

    assert q.dtype == dtype
    expected_q, expected_k, expected_v = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    tables = cos[positions.long()], sin[positions.long()]
    key, value = ops.kv_read(cache, slots)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    for got, expected in (
        (q, rotate(norm(expected_q, q_norm), *tables)),
        (key, rotate(norm(expected_k, k_norm), *tables)),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(value, expected_v.to(dtype))
    # Nothing else was written.
    assert cache.isfinite().sum() == 2 * num_tokens * num_kv_heads * head_dim


@given(num_tokens=st.integers(0, 30), head_dim=HEAD_DIMS, block_size=BLOCK_SIZES, dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_kv_write_and_kv_read(num_tokens, head_dim, block_size, dtype, seed):
    key, value = (normal(num_tokens, 3, head_dim, seed=seed + i).to(dtype) for i in (0, 1))
    slots = random_slots(num_tokens, 4, block_size, seed)
    cache = poisoned_cache(4, 3, block_size, head_dim, dtype)
    ops.kv_write(key, value, slots, cache)
    got_key, got_value = ops.kv_read(cache, slots)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)
    assert cache.isfinite().sum() == 2 * key.numel()
    # Every element has a place of its own, within its block and head.
    everything = torch.arange(4 * block_size)
    all_keys, all_values = ops.kv_read(cache, everything)
    assert all_keys.isfinite().sum() == all_values.isfinite().sum() == key.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_places_within_a_block_are_distinct(dtype, block_size):
    cache = poisoned_cache(3, 2, block_size, 80, dtype)
    slots = random_slots(3 * block_size, 3, block_size, seed=0)
    key, value = (normal(3 * block_size, 2, 80, seed=i).to(dtype) for i in (0, 1))
    ops.kv_write(key, value, slots, cache)
    assert cache.isfinite().all()
    # A block's elements stay in the block and head that the cache's shape says.
    for block in range(3):
        inside = (slots // block_size == block).nonzero()[:, 0]
        for part, source in enumerate((key, value)):
            for head in range(2):
                got = cache[block, head, part].flatten().sort().values
                assert torch.equal(got, source[inside, head].flatten().sort().values)
