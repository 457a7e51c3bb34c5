"""EngineConfig: every setting of an engine, and the rule that sizes the KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steploop.errors import InvalidArgumentError
from steploop.memory import format_bytes

if TYPE_CHECKING:
    from steploop.weights import ModelSpec

BLOCK_SIZES = (8, 16, 32, 64)
_INT32_MAX = 2**31 - 1

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EngineConfig:
    """Settings of an `LLMEngine`, named as in vLLM.

    Raises:
        InvalidArgumentError: a value of the wrong type or range. What depends on the model is checked by the engine.
    """

    model: str | Path
    """A model folder, a GGUF file, or a name on the Hugging Face hub."""
    tokenizer: str | Path | None = None
    """A folder, a GGUF file or a hub name to take the tokenizer from instead of the model."""
    revision: str | None = None
    """The model's branch, tag or commit on the hub."""
    dtype: str = "auto"
    """Compute type. On the CPU "float32" (exact), "bfloat16", or "auto": float32 for a folder of float32 weights, else
    bfloat16 (a GGUF file always). On CUDA "bfloat16" ("auto" too) or "float16"."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache: "float32" or "bfloat16" on the CPU, "auto": the compute type. On CUDA always that."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens. Default: the model's own limit; if the default KV cache
    cannot hold one such sequence, what it can hold (a warning says so)."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, those of decoding sequences and of prompt chunks together."""
    block_size: int = 16
    """Tokens in a KV block: 8, 16, 32 or 64."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes. Default: enough for `max_num_seqs` sequences of `max_model_len`, but at most a
    quarter of the memory that will be available once the weights are loaded (the cgroup's where that is less); on CUDA
    what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """On CUDA, the share of the device's memory, in (0, 1], that weights, activations, KV cache and whatever else is on
    the device may take together. A size given for the KV cache goes before it."""
    num_kv_blocks: int | None = None
    """Size of the KV cache in blocks; instead of `kv_cache_memory_bytes`."""
    num_threads: int | None = None
    """Threads of a step. Default: the physical cores this process may use."""
    seed: int = 0
    """Requests without a seed of their own draw theirs from it."""
    device: str = "cpu"
    """"cpu" or "cuda" (the first device that CUDA_VISIBLE_DEVICES leaves)."""
    batch_invariant: bool = True
    """Whether a request's tokens are the same bits whatever else is in the batch. False, on CUDA only: linear layers
    run in cuBLAS, which may be faster and chooses its order of summation by the size of the batch."""
    scheduling_policy: str = "on_demand"
    """"on_demand": requests join and leave the batch at every step. "static": a batch runs until its last request ends,
    the baseline to compare with."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_int(name, getattr(self, name), low=1)
        for name in ("max_model_len", "num_kv_blocks", "num_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=1)
        if self.kv_cache_memory_bytes is not None:
            _check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, low=1, high=2**63 - 1)
        _check_int("seed", self.seed, low=0, high=2**64 - 1)
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (isinstance(value, (str, Path)) and str(value)) and (name, value) != ("tokenizer", None):
                raise InvalidArgumentError(f"{name} must be a path or a name, got {value!r}")
        for name in ("revision", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("revision", None):
                raise InvalidArgumentError(f"{name} must be a string, got {value!r}")
        if self.block_size not in BLOCK_SIZES:
            raise InvalidArgumentError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}")
        for name in ("dtype", "kv_cache_dtype"):
            _check_choice(name, getattr(self, name), ("auto", "float32", "bfloat16", "float16"))
        if not isinstance(self.batch_invariant, bool):
            raise InvalidArgumentError(f"batch_invariant must be True or False, got {self.batch_invariant!r}")
        if not self.batch_invariant and self.device == "cpu":
            raise InvalidArgumentError(
                "batch_invariant=False is for device='cuda'; the CPU has nothing to gain from it"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise InvalidArgumentError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        _check_choice("scheduling_policy", self.scheduling_policy, ("on_demand", "static"))
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise InvalidArgumentError(
                "set num_kv_blocks or kv_cache_memory_bytes, not both: "
                f"got {self.num_kv_blocks} and {self.kv_cache_memory_bytes}"
            )


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
    num_blocks = min(num_blocks, _INT32_MAX)
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


def _check_memory(name: str, source: str, asked_bytes: int, total_bytes: int, unit_bytes: int) -> None:
    if asked_bytes > total_bytes:
        short = format_bytes(asked_bytes - total_bytes)
        raise InvalidArgumentError(
            f"{source} asks for a KV cache of {format_bytes(asked_bytes)}, but beside what else the engine needs there "
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


def _check_int(name: str, value: object, *, low: int, high: int = _INT32_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise InvalidArgumentError(f"{name} must be >= {low}, got {value}")
    if value > high:
        raise InvalidArgumentError(f"{name} must be <= {high}, got {value}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
