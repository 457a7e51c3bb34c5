"""Rotary embedding, optional QK-norm and the write to the paged cache, against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .kv_caches import KV_DTYPES, element_dtype, poisoned_cache, scales

ops = torch.ops.steploop

DTYPES = st.sampled_from(KV_DTYPES)
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


def random_slots(num_tokens, num_blocks, block_size, seed):
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].contiguous()


def num_written(cache, num_slots):
    """How many elements of keys and values have been written to a cache that was poisoned."""
    if cache.dtype != torch.int8:
        return int(cache.isfinite().sum())
    written = scales(cache).isfinite().sum()
    # Codes beside scales that are still poison are the random ones that the poisoned cache began with.
    seen, fresh = cache.clone(), poisoned_cache(*cache.shape[:2], *cache.shape[3:4], cache.shape[4] - 4, torch.int8)
    for part, (got, began) in enumerate(zip(codes(seen), codes(fresh), strict=True)):
        poisoned = scales(cache)[:, :, part].isnan().transpose(1, 2).reshape(num_slots, -1)
        assert torch.equal(got[poisoned], began[poisoned])
    return int(written) * (cache.shape[4] - 4)


def codes(cache):
    """Keys' and values' codes [slots, kv heads, head_dim] of an int8 cache, whose scales are lost."""
    scales(cache).fill_(1.0)
    return ops.kv_read(cache, torch.arange(cache.shape[0] * cache.shape[3]))


def assert_stored(got, expected, dtype):
    """Keys or values as read from a cache."""
    if dtype == torch.int8:
        step = expected.double().abs().amax(-1, keepdim=True) / 127
        assert ((got.double() - expected.double()).abs() <= step * 0.5001 + 1e-6).all()
        whole = got.double() / step.clamp_min(1e-30)
        torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-2)
    else:
        assert torch.equal(got, expected.to(dtype))


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

    assert q.dtype == element_dtype(dtype)
    expected_q, expected_k, expected_v = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    tables = cos[positions.long()], sin[positions.long()]
    key, value = ops.kv_read(cache, slots)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    rotated_q, rotated_k = rotate(norm(expected_q, q_norm), *tables), rotate(norm(expected_k, k_norm), *tables)
    torch.testing.assert_close(q.double(), rotated_q, rtol=tolerance, atol=1e-5)
    if dtype == torch.int8:
        assert_stored(key, rotated_k, dtype)
    else:
        torch.testing.assert_close(key.double(), rotated_k, rtol=tolerance, atol=1e-5)
    assert_stored(value, expected_v, dtype)
    # Nothing else was written.
    assert num_written(cache, 5 * block_size) == 2 * num_tokens * num_kv_heads * head_dim


@given(num_tokens=st.integers(0, 30), head_dim=HEAD_DIMS, block_size=BLOCK_SIZES, dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_kv_write_and_kv_read(num_tokens, head_dim, block_size, dtype, seed):
    key, value = (normal(num_tokens, 3, head_dim, seed=seed + i).to(element_dtype(dtype)) for i in (0, 1))
    slots = random_slots(num_tokens, 4, block_size, seed)
    cache = poisoned_cache(4, 3, block_size, head_dim, dtype)
    ops.kv_write(key, value, slots, cache)
    got_key, got_value = ops.kv_read(cache, slots)
    assert_stored(got_key, key, dtype)
    assert_stored(got_value, value, dtype)
    assert num_written(cache, 4 * block_size) == 2 * key.numel()
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


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-20, 1e20, torch.inf, torch.nan])
def test_int8_scales_at_the_limits(size):
    cache = poisoned_cache(1, 1, 8, 64, torch.int8)
    key = torch.linspace(-1, 1, 64).view(1, 1, 64) * size
    ops.kv_write(key, key.flip(-1), torch.tensor([3]), cache)
    got, got_value = ops.kv_read(cache, torch.tensor([3]))
    assert torch.equal(got.flip(-1).nan_to_num(7), got_value.nan_to_num(7))
    if size in (0.0, 1e-36):
        assert (got == 0).all()
    elif size == size and size != torch.inf:
        assert_stored(got, key, torch.int8)
    else:
        assert got.isnan().all()
