"""Whether a device can run what is asked of it, what its memory holds, and what torch does there for the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from steploop import _C
from steploop.config import EngineConfig
from steploop.errors import InvalidArgumentError, UnsupportedDeviceError
from steploop.memory import available_memory_bytes, format_bytes, total_memory_bytes
from steploop.scheduling import check_token_budget, check_watermark
from steploop.sizing import KvCacheMemory, KvCacheSize, size_kv_cache, size_swap_space
from steploop.weights import ModelSpec

DEFAULT_CPU_SHARE = 0.25
"""Unless sized by the caller, the KV cache takes at most this share of the memory that the weights leave."""


def check_device(device: str, dtype: str, kv_cache_dtype: str) -> None:
    """Whether the device is there and computes in these types.

    Raises:
        UnsupportedDeviceError: what is missing, and what to do.
        InvalidArgumentError: a KV cache of another type than the device's kernels read.
    """
    if device == "cuda":
        _C.cuda_memory()
        if dtype == "float32":
            raise UnsupportedDeviceError("device cuda computes in bfloat16 or float16, got dtype float32")
        if kv_cache_dtype == "int8":
            raise UnsupportedDeviceError("kv_cache_dtype int8 is for device cpu; device cuda stores the compute type")
        if kv_cache_dtype != dtype:
            raise InvalidArgumentError(
                f"kv_cache_dtype must be the compute type on CUDA, {dtype}, got {kv_cache_dtype}"
            )
    elif device == "cpu":
        if dtype == "float16":
            raise UnsupportedDeviceError("device cpu computes in float32 or bfloat16, got dtype float16")
        if kv_cache_dtype == "float16":
            raise InvalidArgumentError("kv_cache_dtype must be auto, float32, bfloat16 or int8 on the CPU, got float16")
    else:
        raise UnsupportedDeviceError(f"device must be cpu or cuda, got {device}")


def size_memory(
    config: EngineConfig, spec: ModelSpec, weight_bytes: int, dtype: str, kv_cache_dtype: str
) -> tuple[KvCacheSize, int]:
    """The KV cache's size, and the number of its blocks that host memory holds for sequences that were swapped out.

    Args:
        weight_bytes: What the weights will take.

    Raises:
        InvalidArgumentError: memory is too small, or another setting cannot be with these sizes.
        UnsupportedDeviceError, UnsupportedModelError: as `kv_cache_memory`.
    """
    bytes_per_token = _C.Engine.kv_bytes_per_token(spec.to_native(), kv_cache_dtype)
    memory = kv_cache_memory(config, spec, weight_bytes, dtype, kv_cache_dtype)
    size = size_kv_cache(config, spec, bytes_per_token=bytes_per_token, memory=memory)
    check_token_budget(config, size.max_model_len)
    check_watermark(config, size.num_kv_blocks)
    block_size_bytes = config.block_size * bytes_per_token
    num_host_blocks = size_swap_space(
        config,
        num_kv_blocks=size.num_kv_blocks,
        block_size_bytes=block_size_bytes,
        memory_bytes=swap_memory_bytes(config.device, weight_bytes + size.num_kv_blocks * block_size_bytes),
    )
    return size, num_host_blocks


def kv_cache_memory(
    config: EngineConfig, spec: ModelSpec, weight_bytes: int, dtype: str, kv_cache_dtype: str
) -> KvCacheMemory:
    """What there will be once the weights are loaded, which need not be yet.

    Raises:
        UnsupportedDeviceError: no such device here, or one that cannot run this model.
        UnsupportedModelError: a shape that the device's kernels cannot take.
        InvalidArgumentError: too little memory even without a KV cache.
    """
    if config.device != "cuda":
        available = max(0, available_memory_bytes() - weight_bytes)
        return KvCacheMemory(
            default_bytes=int(available * DEFAULT_CPU_SHARE),
            default_source=f"a quarter of the {format_bytes(available)} available",
            total_bytes=max(0, total_memory_bytes() - weight_bytes),
        )
    free, total = _C.cuda_memory()
    activation_bytes = _C.Engine.activation_bytes(
        spec.to_native(),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=config.device,
        max_model_len=config.max_model_len or spec.default_max_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        batch_invariant=config.batch_invariant,
    )
    needed = weight_bytes + activation_bytes
    if needed > free:
        raise InvalidArgumentError(
            f"the device has {format_bytes(free)} of {format_bytes(total)} free, but weights take "
            f"{format_bytes(weight_bytes)} and activations {format_bytes(activation_bytes)}; take a smaller model, or "
            "lower max_num_batched_tokens or max_num_seqs"
        )
    left = max(0, int(total * config.gpu_memory_utilization) - (total - free) - needed)
    return KvCacheMemory(
        default_bytes=left,
        default_source=(
            f"gpu_memory_utilization={config.gpu_memory_utilization} of the device's {format_bytes(total)}, "
            f"{format_bytes(total - free)} of them in use, less {format_bytes(weight_bytes)} of weights and "
            f"{format_bytes(activation_bytes)} of activations,"
        ),
        total_bytes=free - needed,
        advice="raise gpu_memory_utilization, or ",
    )


def swap_memory_bytes(device: str, taken_bytes: int) -> int:
    """The most that a swap space can take of the host's memory beside weights and KV cache, which take `taken_bytes`.

    For a GPU it is pinned, thus taken at once: what is available now. On the CPU pages count once they are used.
    """
    if device == "cuda":
        return available_memory_bytes()
    return max(0, total_memory_bytes() - taken_bytes)


def torch_matmul() -> int:
    """The address of torch's matmul: cuBLAS, on CUDA.

    Raises:
        UnsupportedDeviceError: torch has no CUDA here.
    """
    import torch

    import steploop.ops  # noqa: F401  (loads the operators)

    if not torch.cuda.is_available():
        raise UnsupportedDeviceError(
            f"batch_invariant=False needs a torch that runs on CUDA, torch {torch.__version__} does not here; leave "
            "batch_invariant as it is, or install another torch"
        )
    return int(torch.ops.steploop_cuda.matmul_address())


def torch_stream(native: _C.Engine) -> Callable[[], AbstractContextManager[Any]]:
    """Within it, torch enqueues on the stream on which the engine's steps run."""
    import torch

    if not torch.cuda.is_available():  # tests put another matmul in torch's place
        return nullcontext
    stream = torch.cuda.ExternalStream(native.cuda_stream(), device=0)
    return lambda: torch.cuda.stream(stream)
