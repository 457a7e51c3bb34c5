"""The command `steploop simulate`."""

from __future__ import annotations

import argparse
from typing import Any

import steploop
from steploop.loadtest.plot import check_plot_path
from steploop.loadtest.slo import parse_slo
from steploop.progress import RequestProgress
from steploop.reporting import make_console, write_json
from steploop.simulation import text_report
from steploop.simulation.calibration import Calibration
from steploop.simulation.figures import summarize
from steploop.simulation.plot import write_plot
from steploop.simulation.settings import Settings, read_calibration, read_settings
from steploop.simulation.simulation import SimulationResult
from steploop.simulation.sweep import RATE, Sweep, parse_sweep, with_value

WIDTH = 140  # where the report goes into a file
_MOST_SPANS = 20_000  # of a picture of slots; more could not be told apart

Runs = list[tuple[dict[str, Any], SimulationResult]]


def run_simulate(arguments: argparse.Namespace) -> None:
    """Runs the command; the report goes to standard output, or with --json - to standard error.

    Raises:
        SteploopError: anything the user can mend.
    """
    slo = None if arguments.slo is None else parse_slo(arguments.slo)
    sweep = None if arguments.sweep is None else parse_sweep(arguments.sweep, arguments.sweepable)
    plot_path = None if arguments.plot is None else check_plot_path(arguments.plot)
    if sweep is not None and sweep.name == RATE and arguments.arrivals is None and arguments.workload_file is None:
        arguments.arrivals = "poisson:1"  # of which the rate is another each time
    points = [None] if sweep is None else list(sweep.values)
    calibrations: dict[str, Calibration | None] = {}
    planned = []
    for value in points:  # all of them are checked before the first runs
        of_value = arguments if sweep is None else with_value(arguments, sweep, value)
        if of_value.device not in calibrations:
            calibrations[of_value.device] = read_calibration(of_value)
        planned.append((value, read_settings(of_value, calibrations[of_value.device])))
        if value is not None and sweep is not None and sweep.name == RATE:
            planned[-1][1].source.arrivals.with_rate(value)
    console = make_console(arguments.json, width=WIDTH)
    text_report.print_settings(console, planned[0][1])
    runs: Runs = []
    for value, settings in planned:
        runs.append(_run(settings, sweep, value, slo, with_spans=plot_path is not None))
        if sweep is not None:
            console.rule(f"{sweep.name} = {value}")
        text_report.print_run(console, runs[-1][0])
    if sweep is not None:
        text_report.print_sweep(console, sweep.name, [figures for figures, _ in runs])
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "steploop_version": steploop.__version__,
                "settings": planned[0][1].describe(),
                "workload": planned[0][1].source.specs,
                "sweep": None if sweep is None else {"name": sweep.name, "values": list(sweep.values)},
                "runs": [figures for figures, _ in runs],
            },
        )
    if plot_path is not None:
        write_plot(plot_path, f"steploop simulate: {arguments.model} on {arguments.device}", runs)
        console.print(f"\nThe picture is in {plot_path}.", highlight=False)


def _run(
    settings: Settings, sweep: Sweep | None, value: Any, slo: dict[str, float] | None, *, with_spans: bool
) -> tuple[dict[str, Any], SimulationResult]:
    workload = settings.source.draw(rate=value if sweep is not None and sweep.name == RATE else None)
    done = 0
    with RequestProgress(len(workload), description="Simulating") as progress:

        def report(num_finished: int) -> None:
            nonlocal done
            progress.update(num_finished=num_finished - done, num_tokens=0)
            done = num_finished

        result = settings.run(workload, record_spans=with_spans and len(workload) <= _MOST_SPANS, report=report)
    figures = {"swept": None if sweep is None else value, "workload": workload.summary(), **summarize(result, slo)}
    return figures, result
