"""Rotary embedding, optional QK-norm and the write to the paged cache, on CUDA, against plain torch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def rotation_tables(ops, num_positions, head_dim, theta=10_000.0):
    angles = torch.outer(torch.arange(num_positions).float(), theta ** (-torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos().to(ops.device), angles.sin().to(ops.device)


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


@given(
    num_tokens=st.integers(0, 12),
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (6, 2)]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    with_norms=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]),
    seed=st.integers(0, 2**31),
    order=st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99)),
)
@settings(max_examples=30, deadline=None)
def test_rope_kv_write(ops, num_tokens, heads, head_dim, block_size, dtype, with_norms, seed, order):
    ops.emulate(*order)
    num_heads, num_kv_heads = heads
    qkv = ops.normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=seed)
    q_norm, k_norm = (ops.normal(head_dim, seed=seed + i) if use else None for i, use in enumerate(with_norms))
    positions = ops.integers(100, num_tokens, seed=seed)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(seed))[:num_tokens].to(ops.device)
    shape = 5, num_kv_heads, 2, block_size, head_dim
    cache = torch.full(shape, torch.nan, dtype=dtype, device=ops.device)
    cos, sin = rotation_tables(ops, 100, head_dim)

    q = ops.rope_kv_write(qkv, positions, cos, sin, slots, cache, num_heads, q_norm, k_norm, 1e-6)

    assert q.dtype == dtype
    expected_q, expected_k, value = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    tables = cos[positions.long()], sin[positions.long()]
    written = cache[slots // block_size, :, :, slots % block_size]  # [tokens, kv heads, key or value, head_dim]
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert ops.relative_error(q, rotate(norm(expected_q, q_norm), *tables)) < tolerance
    assert ops.relative_error(written[:, :, 0], rotate(norm(expected_k, k_norm), *tables)) < tolerance
    assert torch.equal(written[:, :, 1], value.to(dtype))
    # Nothing else was written.
    assert cache.isfinite().sum() == 2 * num_tokens * num_kv_heads * head_dim
    # A token's results are its own.
    if num_tokens > 1:
        one = slice(num_tokens - 1, None)
        again = torch.full(shape, torch.nan, dtype=dtype, device=ops.device)
        arguments = (x[one].clone() for x in (qkv, positions))
        got = ops.rope_kv_write(*arguments, cos, sin, slots[one].clone(), again, num_heads, q_norm, k_norm, 1e-6)
        assert torch.equal(got[0], q[-1])
        block, offset = divmod(int(slots[-1]), block_size)
        assert torch.equal(again[block, :, :, offset], cache[block, :, :, offset])
