"""KV caches whose unused parts are poisoned, of every type."""

import torch

from steploop.ops import new_kv_cache

KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def element_dtype(cache_dtype: torch.dtype) -> torch.dtype:
    """Of queries, and of keys and values on their way in and out."""
    return torch.float32 if cache_dtype == torch.int8 else cache_dtype


def poisoned_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype):
    cache = new_kv_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    if dtype != torch.int8:
        return cache.fill_(torch.nan)
    cache.copy_(torch.randint(-128, 128, cache.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8))
    scales(cache).fill_(torch.nan)
    return cache


def scales(cache):
    """Of an int8 cache, behind the codes of each block and head: of its keys, then of its values."""
    num_blocks, num_kv_heads, _, block_size, _ = cache.shape
    per_head = cache.view(num_blocks, num_kv_heads, -1)
    return per_head[..., -2 * block_size * 4 :].view(torch.float32).view(num_blocks, num_kv_heads, 2, block_size)
