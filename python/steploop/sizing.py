"""How large the KV cache and the swap space are, and which `max_model_len` the cache allows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steploop.checks import INT32_MAX
from steploop.config import EngineConfig
from steploop.errors import InvalidArgumentError
from steploop.memory import format_bytes

if TYPE_CHECKING:
    from steploop.weights import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KvCacheSize:
    """What the sizing rule came to."""

    max_model_len: int
    num_kv_blocks: int


@dataclass(frozen=True, kw_only=True)
class KvCacheMemory:
    """The memory there is for a KV cache, once the weights are loaded."""

    default_bytes: int
    """What the cache takes at most unless its size was asked for."""
    default_source: str
    """What that is, in words."""
    total_bytes: int
    """No cache can be larger."""
    advice: str = ""
    """How the default could be more, to be followed by other advice."""


def size_kv_cache(config: EngineConfig, spec: ModelSpec, *, bytes_per_token: int, memory: KvCacheMemory) -> KvCacheSize:
    """Chooses `max_model_len` and the number of KV blocks.

    Args:
        bytes_per_token: KV bytes of one token, all layers.

    Raises:
        InvalidArgumentError: a `max_model_len` the model cannot have, a cache too small for one such sequence, or one
            that memory cannot hold.
    """
    max_model_len = _max_model_len(config, spec)
    block_size_bytes = config.block_size * bytes_per_token
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks, source = config.num_kv_blocks, f"num_kv_blocks={config.num_kv_blocks}"
        _check_memory("num_kv_blocks", source, num_blocks * block_size_bytes, memory.total_bytes, block_size_bytes)
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_size_bytes
        source = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
        _check_memory("kv_cache_memory_bytes", source, config.kv_cache_memory_bytes, memory.total_bytes, 1)
    else:
        num_blocks = min(config.max_num_seqs * blocks_per_sequence, memory.default_bytes // block_size_bytes)
        source = memory.default_source
        if config.max_model_len is None and 0 < num_blocks < blocks_per_sequence:
            logger.warning(
                "max_model_len is %d instead of the model's %d: that is what %s holds. Set kv_cache_memory_bytes to "
                "use more memory, or max_model_len to silence this.",
                num_blocks * config.block_size,
                max_model_len,
                source,
            )
            return KvCacheSize(max_model_len=num_blocks * config.block_size, num_kv_blocks=num_blocks)
    num_blocks = min(num_blocks, INT32_MAX)
    if num_blocks < blocks_per_sequence:
        fits = num_blocks * config.block_size
        advice = (f"lower max_model_len to at most {fits}, or " if fits else "") + memory.advice
        needed, given = blocks_per_sequence * block_size_bytes, num_blocks * block_size_bytes
        raise InvalidArgumentError(
            f"the KV cache must hold one sequence of max_model_len={max_model_len} tokens: that takes "
            f"{blocks_per_sequence} blocks ({format_bytes(needed)}), but {source} gives {num_blocks} "
            f"({format_bytes(given)}), {format_bytes(needed - given)} too little; {advice}set kv_cache_memory_bytes to "
            f"at least {needed}"
        )
    return KvCacheSize(max_model_len=max_model_len, num_kv_blocks=num_blocks)


def size_swap_space(config: EngineConfig, *, num_kv_blocks: int, block_size_bytes: int, memory_bytes: int) -> int:
    """The number of KV blocks that host memory holds for sequences that were swapped out.

    Args:
        memory_bytes: The most it can take.

    Raises:
        InvalidArgumentError: less than a block, or more than memory can hold.
    """
    if config.preemption_mode == "recompute":
        return 0
    if config.swap_space_bytes is None:
        asked = min(num_kv_blocks * block_size_bytes, memory_bytes)
    else:
        asked = config.swap_space_bytes
    if asked < block_size_bytes:
        raise InvalidArgumentError(
            f"swap_space_bytes must hold at least one KV block, which takes {block_size_bytes} bytes, got {asked}"
        )
    _check_memory("swap_space_bytes", f"swap_space_bytes={asked}", asked, memory_bytes, 1, what="swap space")
    return min(asked // block_size_bytes, INT32_MAX)


def _check_memory(
    name: str, source: str, asked_bytes: int, total_bytes: int, unit_bytes: int, *, what: str = "KV cache"
) -> None:
    if asked_bytes > total_bytes:
        short = format_bytes(asked_bytes - total_bytes)
        raise InvalidArgumentError(
            f"{source} asks for a {what} of {format_bytes(asked_bytes)}, but beside what else the engine needs there "
            f"are only {format_bytes(total_bytes)} of memory, {short} too little; lower {name} to at most "
            f"{total_bytes // unit_bytes}"
        )


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.default_max_len
    if config.max_model_len > spec.max_supported_len:
        reason = f"the model's own limit is {spec.max_supported_len} tokens"
        if spec.max_supported_len == spec.sliding_window:
            reason = (
                f"the model's sliding attention window of {spec.sliding_window} tokens is not supported, and up to "
                "that length makes no difference"
            )
        raise InvalidArgumentError(
            f"max_model_len must be <= {spec.max_supported_len}, got {config.max_model_len}: {reason}"
        )
    return config.max_model_len
