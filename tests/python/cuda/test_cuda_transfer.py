"""Copies of KV blocks between pools, on CUDA."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@given(
    shape=st.sampled_from([(1, 2, 8, 64), (3, 2, 16, 96), (2, 2, 64, 128), (8,), (1, 8)]),
    num_pairs=st.integers(0, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
    order=st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99)),
)
@settings(max_examples=30, deadline=None)
def test_transfer_blocks(ops, shape, num_pairs, dtype, seed, order):
    ops.emulate(*order)
    source = ops.normal(7, *shape, seed=seed, dtype=dtype)
    destination = torch.full((9, *shape), torch.nan, dtype=dtype, device=ops.device)
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.stack([torch.randperm(size, generator=generator)[:num_pairs] for size in (7, 9)], dim=1)
    ops.transfer_blocks(source, destination, pairs.int().to(ops.device))
    expected = torch.full_like(destination, torch.nan)
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    assert torch.equal(destination.view(torch.int16), expected.view(torch.int16))


def test_copies_within_one_pool(ops):
    ops.emulate("random", seed=5)
    pool = ops.normal(6, 2, 2, 8, 64, dtype=torch.bfloat16)
    before = pool.clone()
    ops.transfer_blocks(pool, pool, ops.tensor([[0, 3], [0, 5], [1, 4]]))
    assert torch.equal(pool, before[[0, 1, 2, 0, 1, 0]])


@pytest.mark.gpu
def test_pinned_host_memory_and_back():
    import steploop.ops  # noqa: F401

    transfer = torch.ops.steploop_cuda.transfer_blocks
    pool = torch.randn(6, 2, 2, 16, 64, device="cuda").bfloat16()
    host = torch.zeros(4, 2, 2, 16, 64, dtype=torch.bfloat16).pin_memory()
    transfer(pool, host, torch.tensor([[5, 0], [2, 3]], dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(host[[0, 3]], pool[[5, 2]].cpu())
    transfer(host, pool, torch.tensor([[3, 1]], dtype=torch.int32, device="cuda"))
    assert torch.equal(pool[1], pool[2])
    with pytest.raises(RuntimeError, match="^transfer_blocks: src must be on the device of pairs, or in pinned memory"):
        transfer(torch.zeros(4, 8), pool, torch.zeros(1, 2, dtype=torch.int32, device="cuda"))
