"""The command `steploop plan`."""

from __future__ import annotations

import argparse

import steploop
from steploop.checks import check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.loadtest.slo import parse_slo
from steploop.progress import RequestProgress
from steploop.reporting import make_console, write_json
from steploop.simulation.command import WIDTH
from steploop.simulation.planning.limits import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, SEARCHED
from steploop.simulation.planning.search import MOST_DEVICES, Plan, plan
from steploop.simulation.planning.text_report import print_plan
from steploop.simulation.planning.trials import Objective
from steploop.simulation.settings import Settings, read_calibration, read_settings

EXIT_NOTHING_FOUND = 1


def run_plan(arguments: argparse.Namespace) -> int:
    """Runs the command; the report goes to standard output, or with --json - to standard error.

    Returns:
        0, or 1 where nothing meets the objective.

    Raises:
        SteploopError: anything the user can mend.
    """
    check_positive("--rate", arguments.rate)
    objective = Objective(slo=parse_slo(arguments.slo), attainment=arguments.attainment)
    checked_int("--max-devices", arguments.max_devices, low=1, high=MOST_DEVICES)
    if arguments.speedup is not None:
        raise InvalidArgumentError("--speedup cannot be given with --rate, which says how fast recorded times pass")
    degrees = None if arguments.tensor_parallel_size is None else [arguments.tensor_parallel_size]
    calibration = read_calibration(arguments)
    if calibration is not None:
        if degrees not in (None, [1]):
            raise InvalidArgumentError(
                f"--tensor-parallel-size must be 1 for {arguments.device}: a machine that was measured is whole, and "
                f"each replica is one; got {arguments.tensor_parallel_size}"
            )
        degrees = [1]
    settings = read_settings(_filled(arguments), calibration)
    with RequestProgress(None, description="Planning") as progress:
        found = plan(
            settings,
            rate=arguments.rate,
            slo=objective.slo,
            attainment=objective.attainment,
            max_devices=arguments.max_devices,
            degrees=degrees,
            keep=[name for name in SEARCHED if getattr(arguments, name) is not None],
            num_requests=arguments.num_requests,
            report=lambda: progress.update(num_finished=1, num_tokens=0),
        )
    print_plan(make_console(arguments.json, width=WIDTH), found, settings)
    if arguments.json is not None:
        write_json(arguments.json, _as_json(found, settings))
    return EXIT_NOTHING_FOUND if found.chosen is None else 0


def _filled(arguments: argparse.Namespace) -> argparse.Namespace:
    """With something for what is searched for."""
    filled = argparse.Namespace(**vars(arguments))
    filled.num_replicas = 1
    filled.tensor_parallel_size = arguments.tensor_parallel_size or 1
    if arguments.max_num_seqs is None:
        setattr(filled, MAX_NUM_SEQS, 64)
    if arguments.max_num_batched_tokens is None:
        setattr(filled, MAX_NUM_BATCHED_TOKENS, max(2048, arguments.max_model_len or 0))
    if arguments.arrivals is None and arguments.workload_file is None:
        filled.arrivals = f"poisson:{arguments.rate:g}"
    return filled


def _as_json(found: Plan, settings: Settings) -> dict[str, object]:
    return {
        "steploop_version": steploop.__version__,
        "device": settings.deployment.device.as_dict(),
        "workload_options": settings.source.specs,
        **found.as_dict(),
    }
