"""The command `steploop calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from steploop.checks import checked_int
from steploop.config import EngineConfig
from steploop.engine import LLMEngine
from steploop.engine_arguments import engine_config
from steploop.errors import InvalidArgumentError
from steploop.progress import RequestProgress
from steploop.simulation.calibration import NUM_REPEATS, Calibration, calibrate, grid_size
from steploop.simulation.models import shape_of
from steploop.weights import open_checkpoint


def run_calibrate(arguments: argparse.Namespace) -> None:
    """Runs the command; a summary goes to standard output.

    Raises:
        SteploopError: anything the user can mend.
    """
    if not Path(arguments.output).parent.is_dir() or Path(arguments.output).is_dir():  # before all the measuring
        raise InvalidArgumentError(f"FILE must be in a folder that exists, got {arguments.output}")
    repeats = checked_int("--repeats", arguments.repeats, low=1)
    calibration = calibrate_model(engine_config(arguments), repeats)
    calibration.save(arguments.output)
    console = Console()
    print_fit(console, calibration)
    console.print(f"Written to {arguments.output}; use it as: steploop simulate MODEL --device {arguments.output}")


def calibrate_model(config: EngineConfig, num_repeats: int = NUM_REPEATS) -> Calibration:
    """Loads a model and measures it.

    Raises:
        SteploopError: as LLMEngine.
    """
    shape = shape_of(str(config.model), open_checkpoint(config.model, config.revision).spec)
    with (
        LLMEngine(config) as engine,
        RequestProgress(num_repeats * grid_size(engine), description="Calibrating") as progress,
    ):
        return calibrate(
            engine, shape, num_repeats=num_repeats, report=lambda: progress.update(num_finished=1, num_tokens=0)
        )


def print_fit(console: Console, calibration: Calibration) -> None:
    """The factors, and how well they fit."""
    device, fit = calibration.device, calibration.fit
    reached = device.efficiencies
    console.print(
        f"{calibration.model.name}, {calibration.weight_dtype}, KV {calibration.kv_cache_dtype}: weights "
        f"{device.bytes_per_second / 1e9:.1f} GB/s, {device.flops_per_second / 1e9:.0f} GFLOP/s, overlap "
        f"{reached.overlap:.1f}; KV {reached.kv_bandwidth_efficiency * device.bytes_per_second / 1e9:.1f} GB/s, "
        f"prompt attention {reached.attention_compute_efficiency * device.flops_per_second / 1e9:.0f} GFLOP/s; "
        f"{reached.step_us:.0f} us a step, {reached.sequence_us:.1f} a sequence, {reached.sample_row_us:.1f} a sample",
        highlight=False,
    )
    console.print(
        f"steps of the grid: {len(calibration.steps['device_us'])}; off by {fit['median']:.1%} (median), "
        f"{fit['p90']:.1%} (p90), {fit['max']:.1%} (at most)",
        highlight=False,
    )
