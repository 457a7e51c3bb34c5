"""Plan: the checked settings of a load test, from the command's arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steploop.checks import as_finite, check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.loadtest.open_loop import Limits
from steploop.loadtest.plot import check_plot_path
from steploop.loadtest.slo import parse_slo
from steploop.workload import (
    Arrivals,
    Gamma,
    Lengths,
    RecordedArrivals,
    RecordedLengths,
    Workload,
    draw_workload,
    parse_arrivals,
    parse_lengths,
    read_lengths,
)

DEFAULT_PROMPT_LENGTHS = "uniform:32:256"
DEFAULT_OUTPUT_LENGTHS = "exponential:64:256:clip"
DEFAULT_NUM_REQUESTS = 100

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class PlannedRun:
    """A run over one workload."""

    rate: float | None
    """Of its arrivals; None: they have none of their own."""
    workload: Workload


@dataclass(frozen=True)
class Plan:
    """All runs, and what becomes of their figures."""

    runs: list[PlannedRun]
    limits: Limits
    num_warmups: int
    temperature: float
    slo: dict[str, float] | None
    extra_body: dict[str, Any]
    json_path: str | None
    plot_path: Path | None
    specs: dict[str, Any]
    """What the workload was drawn from, for the report."""


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Checks everything that can be without the target.

    Raises:
        InvalidArgumentError: a setting that cannot be, alone or with another.
    """
    _check_kind_of_test(arguments)
    lengths = _lengths(arguments)
    processes = _arrivals(arguments)
    num_requests = arguments.num_requests
    if num_requests is None:
        num_requests = _num_recorded(*lengths, *(arrivals for _, arrivals in processes)) or DEFAULT_NUM_REQUESTS
    check_positive("--timeout", arguments.timeout)
    temperature = as_finite(arguments.temperature)
    if temperature is None or temperature < 0:
        raise InvalidArgumentError(f"--temperature must be a finite number >= 0, got {arguments.temperature}")
    if arguments.max_concurrency is not None:
        checked_int("--max-concurrency", arguments.max_concurrency, low=1)
    if arguments.vocab_size is not None:
        checked_int("--vocab-size", arguments.vocab_size, low=1)
    _check_json_path(arguments.json)
    return Plan(
        runs=[
            PlannedRun(rate, draw_workload(num_requests, lengths=lengths, arrivals=arrivals, seed=arguments.seed))
            for rate, arrivals in processes
        ],
        limits=Limits(arguments.max_concurrency, arguments.timeout),
        num_warmups=checked_int("--num-warmups", arguments.num_warmups, low=0),
        temperature=temperature,
        slo=None if arguments.slo is None else parse_slo(arguments.slo),
        extra_body=_extra_body(arguments.extra_body),
        json_path=arguments.json,
        plot_path=None if arguments.plot is None else check_plot_path(arguments.plot),
        specs={
            name: getattr(arguments, name)
            for name in ("prompt_lengths", "output_lengths", "lengths_file", "arrivals", "rate_sweep", "seed")
        },
    )


def _check_kind_of_test(arguments: argparse.Namespace) -> None:
    if (arguments.model is None) == (arguments.url is None):
        given = "neither" if arguments.model is None else "both"
        raise InvalidArgumentError(f"give MODEL to test in process, or --url of a server, got {given}")
    if arguments.url is None:
        foreign, kind = arguments.server_options, "--url"
    else:
        foreign, kind = arguments.engine_options, "MODEL"
    for name, default in foreign.items():
        if getattr(arguments, name) != default:
            option = "--model" if name == "served_model" else f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"{option} is for a test with {kind}")


def _lengths(arguments: argparse.Namespace) -> tuple[Lengths, Lengths]:
    if arguments.lengths_file is not None:
        if arguments.prompt_lengths is not None or arguments.output_lengths is not None:
            raise InvalidArgumentError("give --lengths-file, or --prompt-lengths and --output-lengths, not both")
        return read_lengths(arguments.lengths_file)
    # So that the report says what was drawn from.
    arguments.prompt_lengths = arguments.prompt_lengths or DEFAULT_PROMPT_LENGTHS
    arguments.output_lengths = arguments.output_lengths or DEFAULT_OUTPUT_LENGTHS
    return parse_lengths(arguments.prompt_lengths), parse_lengths(arguments.output_lengths)


def _arrivals(arguments: argparse.Namespace) -> list[tuple[float | None, Arrivals]]:
    """Each run's rate and process."""
    if arguments.arrivals is None:
        arguments.arrivals = "burst" if arguments.rate_sweep is None else "poisson:1"
    arrivals = parse_arrivals(arguments.arrivals)
    if arguments.rate_sweep is None:
        return [(arrivals.rate if isinstance(arrivals, Gamma) else None, arrivals)]
    if not isinstance(arrivals, Gamma):
        raise InvalidArgumentError(f"--rate-sweep needs arrivals that have a rate, got {arguments.arrivals}")
    try:
        rates = [float(rate) for rate in arguments.rate_sweep.split(",")]
    except ValueError:
        raise InvalidArgumentError(
            f"--rate-sweep must be numbers with commas between them, got {arguments.rate_sweep!r}"
        ) from None
    return [(rate, dataclasses.replace(arrivals, rate=rate)) for rate in rates]


def _num_recorded(*sources: Lengths | Arrivals) -> int | None:
    """How many requests there is a record for; None: nothing is recorded."""
    recorded = [
        len(source.lengths) if isinstance(source, RecordedLengths) else len(source.times)
        for source in sources
        if isinstance(source, (RecordedLengths, RecordedArrivals))
    ]
    return min(recorded, default=None)


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"--extra-body must be JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"--extra-body must be a JSON object, got {text}")
    return fields


def _check_json_path(path: str | None) -> None:
    if path is None or path == STANDARD_OUTPUT:
        return
    try:
        with open(path, "ab"):  # tells at once whether there will be a place for the figures
            pass
    except OSError as error:
        raise InvalidArgumentError(f"--json {path} cannot be written: {error.strerror}") from None
