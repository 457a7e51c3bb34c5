"""Settings: what the arguments of `steploop simulate` and `plan` ask for, checked."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from steploop.config import QUANTIZATIONS, EngineConfig
from steploop.engine_arguments import scheduling_settings
from steploop.errors import InvalidArgumentError
from steploop.simulation.calibration import Calibration
from steploop.simulation.costs import Deployment
from steploop.simulation.devices import find_device
from steploop.simulation.models import ModelShape, find_model
from steploop.simulation.simulation import SimulationResult, simulate
from steploop.workload import Workload, WorkloadSource, workload_source

THIS_MACHINE = "this-machine"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One simulation, but for its workload's rate and seed."""

    deployment: Deployment
    engine: EngineConfig
    source: WorkloadSource
    num_replicas: int = 1
    routing: str = "least_outstanding"
    note: str | None = None
    """For the report."""
    max_tokens: int | None = None

    def run(self, workload: Workload, **options: Any) -> SimulationResult:
        """Simulates it; `options` are those of `simulate` besides."""
        return simulate(
            workload,
            self.deployment,
            self.engine,
            max_tokens=self.max_tokens,
            num_replicas=self.num_replicas,
            routing=self.routing,
            **options,
        )

    def describe(self) -> dict[str, Any]:
        """For a report."""
        names = (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "scheduling_policy",
            "queue_order",
            "preemption_mode",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        )
        return {
            **self.deployment.describe(),
            "num_replicas": self.num_replicas,
            "routing": self.routing,
            **{name: getattr(self.engine, name) for name in names},
            "factors": dataclasses.asdict(self.deployment.device.efficiencies),
        }


def read_settings(arguments: argparse.Namespace, calibration: Calibration | None) -> Settings:
    """Of what `add_simulate_arguments` has read.

    Args:
        calibration: Where the device was measured.

    Raises:
        InvalidArgumentError: a setting that cannot be, alone or with another.
    """
    model = find_model(arguments.model)
    device = find_device(arguments.device) if calibration is None else calibration.device
    if arguments.efficiency is not None:
        changes = _factors(arguments.efficiency)
        device = dataclasses.replace(device, efficiencies=device.efficiencies.replace(changes))
    weight_dtype, kv_cache_dtype = "bfloat16", "bfloat16"
    if calibration is not None:
        weight_dtype, kv_cache_dtype = calibration.weight_dtype, calibration.kv_cache_dtype
        for name, given, measured in (
            ("--dtype", arguments.dtype, weight_dtype),
            ("--kv-cache-dtype", arguments.kv_cache_dtype, kv_cache_dtype),
        ):
            if given not in (None, measured):
                raise InvalidArgumentError(
                    f"{name} must be {measured}, which {device.name} was measured with, got {given}"
                )
    deployment = Deployment(
        model=model,
        device=device,
        tensor_parallel_size=arguments.tensor_parallel_size,
        weight_dtype=arguments.dtype or weight_dtype,
        kv_cache_dtype=arguments.kv_cache_dtype or kv_cache_dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    engine = EngineConfig(
        model=arguments.model,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_kv_blocks=arguments.num_kv_blocks,
        **scheduling_settings(arguments),
    )
    return Settings(
        deployment=deployment,
        engine=engine,
        source=workload_source(arguments),
        num_replicas=arguments.num_replicas,
        routing=arguments.routing,
        note=_note(model, calibration),
        max_tokens=arguments.max_tokens,
    )


def _note(model: ModelShape, calibration: Calibration | None) -> str | None:
    if calibration is None or dataclasses.replace(calibration.model, name=model.name) == model:
        return None
    return f"{calibration.device.name} was measured with {calibration.model.name}, a model of other sizes"


def read_calibration(arguments: argparse.Namespace) -> Calibration | None:
    """What was measured of the device: from its file, or now; None: a preset.

    Raises:
        SteploopError: a file that is none, or a model that cannot be loaded.
    """
    if arguments.device == THIS_MACHINE:
        from steploop.simulation.calibrate_command import calibrate_model

        quantization = arguments.dtype if arguments.dtype in QUANTIZATIONS else None
        config = EngineConfig(
            model=arguments.model,
            dtype="auto" if quantization else arguments.dtype or "auto",
            quantization=quantization,
            kv_cache_dtype=arguments.kv_cache_dtype or "auto",
        )
        return calibrate_model(config)
    if arguments.device.endswith(".json"):
        return Calibration.load(arguments.device)
    return None


def _factors(text: str) -> dict[str, float]:
    factors: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            factors[name] = float(value)
        except ValueError:
            raise InvalidArgumentError(f"--efficiency must be NAME=NUMBER,..., got {part.strip()!r}") from None
    return factors
