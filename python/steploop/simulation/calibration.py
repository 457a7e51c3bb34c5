"""Calibration: the factors of this machine, from a short run of the real engine on a grid of steps."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steploop.engine import LLMEngine
from steploop.errors import InvalidArgumentError
from steploop.memory import total_memory_bytes
from steploop.sampling_params import SamplingParams
from steploop.simulation.costs import Deployment
from steploop.simulation.devices import Device, Efficiencies
from steploop.simulation.fit import WORK, FittedFactors, FloatArray, MeasuredSteps, fit_factors
from steploop.simulation.models import ModelShape
from steploop.simulation.simulation import simulate
from steploop.workload import Workload

FORMAT = "steploop calibration 1"
NUM_REPEATS = 3
NUM_DECODE_STEPS = 8
_FEWEST_RUNS = 10

# (sequences, prompt tokens of each): decodes of so many at about such a context, after their prompts.
_DECODES = ((1, 16), (1, 1024), (2, 16), (4, 16), (4, 512), (8, 16), (16, 16), (16, 384), (32, 16), (32, 128), (64, 16))
# Prompts alone.
_PROMPTS = (8, 16, 32, 64, 128, 256, 512, 1024, 1900)
# (sequences that decode, prompt tokens that come beside them).
_MIXED = ((4, 32), (16, 32), (16, 128), (32, 512))

_HOST_BYTES_PER_SECOND = 5e9  # of a copy within one machine's memory; only swapping goes by it

Run = list[tuple[int, int]]
"""(prompt tokens, output tokens) of each request, all offered at once."""
StepTimes = tuple[FloatArray, FloatArray]
"""By step: microseconds in forward pass and sampling, and besides, up to the next step."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, of which model, and how well the cost model fits it.

    Use `device` as any other, with the model and the types that it is of.

    Raises:
        InvalidArgumentError: a type that there is not.
    """

    device: Device
    model: ModelShape
    weight_dtype: str
    kv_cache_dtype: str
    about: dict[str, Any]
    """Threads, instruction set and the like."""
    fit: dict[str, float]
    """Errors of the fitted model at the grid's steps, relative: "median", "p90" and "max"."""
    steps: dict[str, list[float]]
    """The steps themselves, in columns."""

    def __post_init__(self) -> None:
        Deployment(
            model=self.model,
            device=self.device,
            weight_dtype=self.weight_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def save(self, path: str | Path) -> None:
        """Writes it as JSON.

        Raises:
            InvalidArgumentError: it cannot be written.
        """
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(f"{path} cannot be written: {error.strerror}") from None

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            InvalidArgumentError: no such file, or not such a file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise InvalidArgumentError(f"{path} is no {FORMAT}; make one with: steploop calibrate MODEL {path}")
        try:
            device = content.pop("device")
            efficiencies = Efficiencies(**device.pop("efficiencies"))
            device["fast_dtypes"] = tuple(device["fast_dtypes"])
            return Calibration(
                device=Device(**device, efficiencies=efficiencies), model=ModelShape(**content.pop("model")), **content
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidArgumentError(f"{path} is damaged: {error}") from None


def calibrate(
    engine: LLMEngine,
    model: ModelShape,
    *,
    name: str = "this-machine",
    num_repeats: int = NUM_REPEATS,
    report: Callable[[], None] = lambda: None,
) -> Calibration:
    """Measures steps of an engine with nothing in flight, and fits the cost model to them.

    Every run of the grid is made `num_repeats` times; the median of each step counts. What a step did is what the
    simulator's scheduler says for the same requests and durations.

    Args:
        model: The engine's.
        report: Called after each run of the grid.

    Raises:
        InvalidArgumentError: requests are in flight.
    """
    if engine.has_unfinished_requests():
        raise InvalidArgumentError("calibrate needs an engine with nothing in flight")
    weight_dtype = engine.quantization or engine.dtype
    kv_cache_dtype = engine.kv_cache_dtype
    blank = Device(
        name=name,
        memory_bytes=total_memory_bytes(),
        bytes_per_second=1.0,
        flops_per_second=1.0,
        link_bytes_per_second=1.0,
        all_reduce_us=0.0,
        host_bytes_per_second=_HOST_BYTES_PER_SECOND,
        fast_dtypes=(),
        is_calibrated=True,
    )
    deployment = Deployment(model=model, device=blank, weight_dtype=weight_dtype, kv_cache_dtype=kv_cache_dtype)
    if engine.config.target_step_duration_ms is not None:
        raise InvalidArgumentError("calibrate needs steps that are the same each time: no target_step_duration_ms")
    runs = list(_grid(engine))
    if len(runs) < _FEWEST_RUNS:
        raise InvalidArgumentError(
            f"calibrate needs room for at least {_FEWEST_RUNS} of its runs, got {len(runs)}: raise max_model_len "
            f"({engine.max_model_len}), max_num_seqs or the KV cache"
        )
    times: list[list[StepTimes]] = [[] for _ in runs]
    for _ in range(num_repeats):  # each goes over the whole grid, so that a machine that drifts does so for all steps
        for run, of_run in zip(runs, times, strict=True):
            of_run.append(_measure(engine, run))
            report()
    steps = _joined([_steps_of(engine, deployment, run, of_run) for run, of_run in zip(runs, times, strict=True)])
    fields = deployment.cost_fields(engine.config.block_size)
    factors = fit_factors(steps, fields)
    device = measured_device(blank, factors)
    stats = engine.stats()
    return Calibration(
        device=device,
        model=model,
        weight_dtype=weight_dtype,
        kv_cache_dtype=kv_cache_dtype,
        about={"num_threads": stats["num_threads"], "isa": stats["isa"]},
        fit=_errors(dataclasses.replace(deployment, device=device), engine.config.block_size, steps),
        steps={
            **{column: values.tolist() for column, values in steps.work.items()},
            "device_us": steps.device_us.tolist(),
            "host_us": steps.host_us.tolist(),
        },
    )


def grid_size(engine: LLMEngine) -> int:
    """How many runs the grid has."""
    return sum(1 for _ in _grid(engine))


def _grid(engine: LLMEngine) -> Iterator[Run]:
    limits = engine.config
    longest = engine.max_model_len - NUM_DECODE_STEPS
    room = engine.stats()["num_kv_blocks"] * limits.block_size
    runs: list[Run] = [[(prompt, 1)] for prompt in _PROMPTS]
    runs += [[(prompt, NUM_DECODE_STEPS)] * count for count, prompt in _DECODES]
    # The short ones decode while the last one's prompt goes through.
    runs += [[(16, NUM_DECODE_STEPS)] * count + [(prompt, 2)] * 4 for count, prompt in _MIXED]
    for run in runs:
        num_tokens = sum(prompt + output + limits.block_size for prompt, output in run)
        if len(run) <= limits.max_num_seqs and max(run)[0] <= longest and num_tokens <= room:
            yield run


def _measure(engine: LLMEngine, run: Run) -> StepTimes:
    """Makes a run."""
    engine.iteration_stats()
    for index, (prompt, output) in enumerate(run):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        token_ids = [random.randrange(engine.vocab_size) for _ in range(prompt)]  # none finds another's in the cache
        engine.add_request(f"calibrate-{index}", {"prompt_token_ids": token_ids}, params)
    while engine.has_unfinished_requests():
        engine.step()
    ended = time.monotonic()
    iterations = engine.iteration_stats()
    began = [iteration["timestamp"] for iteration in iterations]
    device_us = np.array([float(iteration["forward_us"] + iteration["sample_us"]) for iteration in iterations])
    return device_us, np.maximum(np.diff([*began, ended]) * 1e6 - device_us, 0.0)


def _steps_of(engine: LLMEngine, deployment: Deployment, run: Run, times: list[StepTimes]) -> MeasuredSteps:
    """The steps of a run, and the medians of their times."""
    device_us = np.median([device for device, _ in times], axis=0)
    host_us = np.median([host for _, host in times], axis=0)
    return MeasuredSteps(_work_of(engine, deployment, run, np.maximum(device_us + host_us, 1.0)), device_us, host_us)


def _work_of(engine: LLMEngine, deployment: Deployment, run: Run, total_us: FloatArray) -> dict[str, FloatArray]:
    workload = Workload(
        seed=0,
        arrival_times=np.zeros(len(run)),
        num_prompt_tokens=np.array([prompt for prompt, _ in run], np.int32),
        num_output_tokens=np.array([output for _, output in run], np.int32),
    )
    config = dataclasses.replace(
        engine.config,
        max_model_len=engine.max_model_len,
        num_kv_blocks=engine.stats()["num_kv_blocks"],
        kv_cache_memory_bytes=None,
    )
    result = simulate(
        workload,
        deployment,
        config,
        max_tokens=workload.num_output_tokens,
        record_schedule=True,
        step_durations_us=np.rint(total_us).astype(np.int64),
    )
    schedule = result.raw["schedule"]
    num_sequences = np.diff(schedule["offsets"])
    columns = {"num_sequences": num_sequences, **{name: schedule[name] for name in WORK if name != "num_sequences"}}
    return {name: columns[name].astype(np.float64) for name in WORK}


def _joined(parts: list[MeasuredSteps]) -> MeasuredSteps:
    names = parts[0].work
    return MeasuredSteps(
        {name: np.concatenate([part.work[name] for part in parts]) for name in names},
        np.concatenate([part.device_us for part in parts]),
        np.concatenate([part.host_us for part in parts]),
    )


def measured_device(blank: Device, factors: FittedFactors) -> Device:
    """A device with these factors: its rates are what is reached."""
    return dataclasses.replace(
        blank,
        bytes_per_second=factors.bytes_per_second,
        flops_per_second=factors.flops_per_second,
        efficiencies=Efficiencies(
            weight_bandwidth_efficiency=1.0,
            compute_efficiency=1.0,
            kv_bandwidth_efficiency=factors.kv_bytes_per_second / factors.bytes_per_second,
            attention_compute_efficiency=factors.attention_flops_per_second / factors.flops_per_second,
            overlap=factors.overlap,
            step_us=factors.step_us,
            sequence_us=factors.sequence_us,
            sample_row_us=factors.sample_row_us,
        ),
    )


def _errors(deployment: Deployment, block_size: int, steps: MeasuredSteps) -> dict[str, float]:
    from steploop import _C

    cost = _C.CostModel(deployment.cost_fields(block_size))
    rows = zip(*(values.astype(int).tolist() for values in steps.work.values()), strict=True)
    fitted = np.array([cost.duration_us(**dict(zip(steps.work, row, strict=True))) for row in rows])
    errors = np.abs(fitted / steps.total_us - 1)
    median, p90, largest = np.quantile(errors, [0.5, 0.9, 1.0]).tolist()
    return {"median": median, "p90": p90, "max": largest}
