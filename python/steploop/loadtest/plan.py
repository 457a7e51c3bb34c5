"""Plan: the checked settings of a load test, from the command's arguments."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steploop.checks import as_finite, check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.loadtest.open_loop import Limits
from steploop.loadtest.plot import check_plot_path
from steploop.loadtest.slo import parse_slo
from steploop.reporting import STANDARD_OUTPUT
from steploop.workload import Workload, workload_source


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
    source = workload_source(arguments)
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
            PlannedRun(source.arrivals.mean_rate if rate is None else rate, source.draw(rate=rate))
            for rate in source.rates
        ],
        limits=Limits(arguments.max_concurrency, arguments.timeout),
        num_warmups=checked_int("--num-warmups", arguments.num_warmups, low=0),
        temperature=temperature,
        slo=None if arguments.slo is None else parse_slo(arguments.slo),
        extra_body=_extra_body(arguments.extra_body),
        json_path=arguments.json,
        plot_path=None if arguments.plot is None else check_plot_path(arguments.plot),
        specs=source.specs,
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
