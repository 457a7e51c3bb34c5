"""What the steps of a model cost on a device, and how much of its memory is left for the KV cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from steploop.checks import check_choice, checked_int
from steploop.errors import InvalidArgumentError
from steploop.memory import format_bytes
from steploop.simulation.devices import Device
from steploop.simulation.models import KV_BITS, WEIGHT_BITS, ModelShape

MOST_DEVICES = 64
"""The largest tensor-parallel degree that an error message looks for."""

_ACTIVATION_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on one or several devices that share its layers.

    Raises:
        InvalidArgumentError: a type that there is not, or a degree that does not divide the heads.
    """

    model: ModelShape
    device: Device
    tensor_parallel_size: int = 1
    weight_dtype: str = "bfloat16"
    kv_cache_dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        check_choice("dtype", self.weight_dtype, tuple(WEIGHT_BITS))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_BITS))
        degree = checked_int("tensor_parallel_size", self.tensor_parallel_size, low=1)
        if degree > 1 and self.device.is_calibrated:
            raise InvalidArgumentError(
                f"tensor_parallel_size must be 1 on {self.device.name}, which was measured as it is, got {degree}"
            )
        if self.model.num_heads % degree:
            raise InvalidArgumentError(
                f"tensor_parallel_size must divide the {self.model.num_heads} heads of {self.model.name}, got {degree}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")

    @property
    def weight_bytes(self) -> int:
        """Of all weights, on each device."""
        return -(-int(self.model.num_parameters * WEIGHT_BITS[self.weight_dtype]) // (8 * self.tensor_parallel_size))

    @property
    def kv_bytes_per_token(self) -> int:
        """On each device. Fewer key and value heads than devices are held by several."""
        model, degree = self.model, self.tensor_parallel_size
        # A device holds the keys of all its queries: as many heads as these may lie in.
        num_queries = model.num_heads // degree
        group = model.num_heads // model.num_kv_heads
        num_heads = max(
            (first + num_queries - 1) // group - first // group + 1 for first in range(0, model.num_heads, num_queries)
        )
        elements = model.num_kv_elements_per_token * num_heads // model.num_kv_heads
        return elements * KV_BITS[self.kv_cache_dtype] // 8

    @property
    def kv_cache_memory_bytes(self) -> int:
        """Of each device, what `gpu_memory_utilization` leaves beside the weights; < 0: they do not fit."""
        return int(self.device.memory_bytes * self.gpu_memory_utilization) - self.weight_bytes

    def num_kv_blocks(self, block_size: int, max_model_len: int, kv_cache_memory_bytes: int | None = None) -> int:
        """KV blocks that memory holds, or so many bytes of it on each device.

        Raises:
            InvalidArgumentError: it does not hold one sequence of `max_model_len`: by how many bytes, and at which
                degree it would.
        """
        room = self.kv_cache_memory_bytes
        needed = -(-max_model_len // block_size) * block_size * self.kv_bytes_per_token
        if room < needed:
            raise InvalidArgumentError(self._does_not_fit(needed - room, max_model_len, block_size))
        if kv_cache_memory_bytes is not None:
            if kv_cache_memory_bytes > room:
                raise InvalidArgumentError(
                    f"kv_cache_memory_bytes must be at most {room} ({format_bytes(room)}), which is what "
                    f"{self.device.name} has left beside the weights, got {kv_cache_memory_bytes}"
                )
            if kv_cache_memory_bytes < needed:
                raise InvalidArgumentError(
                    f"kv_cache_memory_bytes must hold a sequence of max_model_len={max_model_len} tokens, which takes "
                    f"{needed} bytes on each device, got {kv_cache_memory_bytes}"
                )
            room = kv_cache_memory_bytes
        return min(room // (block_size * self.kv_bytes_per_token), 2**31 - 1)

    def cost_fields(self, block_size: int) -> dict[str, float]:
        """The fields of the native CostModel: amounts of each device, its rates, and what of these is reached."""
        model, device, degree = self.model, self.device, self.tensor_parallel_size
        reached = device.efficiencies
        bits = WEIGHT_BITS[self.weight_dtype]
        exchange_us = 0.0
        step_us = reached.step_us
        if degree > 1:
            # Two all-reduces a layer: a ring sends each byte 2 (degree - 1) / degree times (Patarasuk and Yuan 2009).
            step_us += 2 * model.num_layers * device.all_reduce_us
            sent = 2 * (degree - 1) / degree * model.hidden_size * _ACTIVATION_BYTES
            exchange_us = 2 * model.num_layers * sent / device.link_bytes_per_second * 1e6
        # Fewer bits of a weight are multiplied faster only where inputs are quantised, too, and the device can.
        faster = 2.0 if self.weight_dtype in device.fast_dtypes else 1.0
        return {
            "weight_bytes": model.num_linear_parameters * bits / 8 / degree,
            "weight_flops_per_token": 2.0 * model.num_linear_parameters / degree,
            "output_bytes": model.num_output_parameters * bits / 8 / degree,
            "output_flops_per_row": 2.0 * model.num_output_parameters / degree,
            "kv_bytes_per_token": float(self.kv_bytes_per_token),
            "attention_flops_per_pair": model.attention_flops_per_pair / degree,
            "block_bytes": float(block_size * self.kv_bytes_per_token),
            "bytes_per_second": device.bytes_per_second,
            "flops_per_second": device.flops_per_second * faster,
            "host_bytes_per_second": device.host_bytes_per_second,
            "weight_bandwidth_efficiency": reached.weight_bandwidth_efficiency,
            "compute_efficiency": reached.compute_efficiency,
            "kv_bandwidth_efficiency": reached.kv_bandwidth_efficiency,
            # Attention is in 16 bits whatever the weights are.
            "attention_compute_efficiency": reached.attention_compute_efficiency / faster,
            "overlap": reached.overlap,
            "step_us": step_us,
            "sequence_us": reached.sequence_us,
            "sample_row_us": reached.sample_row_us,
            "token_us": reached.token_us + exchange_us,
        }

    def describe(self) -> dict[str, Any]:
        """For a report."""
        return {
            "model": self.model.name,
            "device": self.device.name,
            "tensor_parallel_size": self.tensor_parallel_size,
            "dtype": self.weight_dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }

    def _does_not_fit(self, short: int, max_model_len: int, block_size: int) -> str:
        text = (
            f"{self.model.name} in {self.weight_dtype} and the KV cache of a sequence of {max_model_len} tokens do not "
            f"fit {self.device.name} at tensor_parallel_size={self.tensor_parallel_size}: {short} bytes "
            f"({format_bytes(short)}) too little on each device"
        )
        degree = self._smallest_degree(max_model_len, block_size)
        if degree is None:
            return f"{text}; nor would {MOST_DEVICES} of them do"
        return f"{text}; they would at {degree}"

    def _smallest_degree(self, max_model_len: int, block_size: int) -> int | None:
        for degree in range(self.tensor_parallel_size + 1, MOST_DEVICES + 1):
            if self.model.num_heads % degree:
                continue
            other = dataclasses.replace(self, tensor_parallel_size=degree)
            needed = -(-max_model_len // block_size) * block_size * other.kv_bytes_per_token
            if other.kv_cache_memory_bytes >= needed:
                return degree
        return None
