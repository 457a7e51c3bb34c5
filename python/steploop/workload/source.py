"""WorkloadSource: what the workload options of a command ask for, checked and ready to draw from."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from steploop.checks import check_positive
from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import Arrivals, RecordedArrivals
from steploop.workload.columns import Workload
from steploop.workload.draw import draw_workload
from steploop.workload.files import read_lengths
from steploop.workload.lengths import Lengths, RecordedLengths
from steploop.workload.specs import parse_arrivals, parse_lengths

DEFAULT_PROMPT_LENGTHS = "uniform:32:256"
DEFAULT_OUTPUT_LENGTHS = "exponential:64:256:clip"
DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class WorkloadSource:
    """What workloads are drawn from."""

    lengths: tuple[Lengths, Lengths]
    """Of prompts and of outputs."""
    arrivals: Arrivals
    num_requests: int = DEFAULT_NUM_REQUESTS
    seed: int = 0
    rates: tuple[float | None, ...] = (None,)
    """A workload is asked for with each; None: that of the arrivals."""
    specs: dict[str, Any]
    """The options that say so, for reports."""

    def draw(self, num_requests: int | None = None, *, seed: int | None = None, rate: float | None = None) -> Workload:
        """A workload; the same for the same numbers. What is None is as the options say.

        Raises:
            InvalidArgumentError: as draw_workload; and a rate for arrivals that have none.
        """
        return draw_workload(
            self.num_requests if num_requests is None else num_requests,
            lengths=self.lengths,
            arrivals=self.arrivals if rate is None else self.arrivals.with_rate(rate),
            seed=self.seed if seed is None else seed,
        )


def workload_source(arguments: argparse.Namespace) -> WorkloadSource:
    """Of what `add_workload_arguments` has read.

    Raises:
        InvalidArgumentError: an option that cannot be, alone or with another; an unreadable file, or a bad line of it.
    """
    specs = {name: getattr(arguments, name, None) for name in SPEC_NAMES}
    lengths = _lengths(specs)
    arrivals = _arrivals(specs)
    num_requests = arguments.num_requests
    if num_requests is None:
        num_requests = _num_recorded(*lengths, arrivals) or DEFAULT_NUM_REQUESTS
    return WorkloadSource(
        lengths=lengths,
        arrivals=arrivals,
        num_requests=num_requests,
        seed=arguments.seed,
        rates=_rates(specs, arrivals),
        specs=specs,
    )


SPEC_NAMES = ("prompt_lengths", "output_lengths", "lengths_file", "arrivals", "rate_sweep", "seed")


def _lengths(specs: dict[str, Any]) -> tuple[Lengths, Lengths]:
    if specs["lengths_file"] is not None:
        if specs["prompt_lengths"] is not None or specs["output_lengths"] is not None:
            raise InvalidArgumentError("give --lengths-file, or --prompt-lengths and --output-lengths, not both")
        return read_lengths(specs["lengths_file"])
    # So that the report says what was drawn from.
    specs["prompt_lengths"] = specs["prompt_lengths"] or DEFAULT_PROMPT_LENGTHS
    specs["output_lengths"] = specs["output_lengths"] or DEFAULT_OUTPUT_LENGTHS
    return parse_lengths(specs["prompt_lengths"]), parse_lengths(specs["output_lengths"])


def _arrivals(specs: dict[str, Any]) -> Arrivals:
    if specs["arrivals"] is None:
        specs["arrivals"] = "burst" if specs["rate_sweep"] is None else "poisson:1"
    return parse_arrivals(specs["arrivals"])


def _rates(specs: dict[str, Any], arrivals: Arrivals) -> tuple[float | None, ...]:
    if specs["rate_sweep"] is None:
        return (None,)
    if arrivals.mean_rate is None:
        raise InvalidArgumentError(f"--rate-sweep needs arrivals that have a rate, got {specs['arrivals']}")
    try:
        rates = tuple(float(rate) for rate in specs["rate_sweep"].split(","))
    except ValueError:
        raise InvalidArgumentError(
            f"--rate-sweep must be numbers with commas between them, got {specs['rate_sweep']!r}"
        ) from None
    for rate in rates:
        check_positive("the rate of arrivals", rate)
    return rates


def _num_recorded(*sources: Lengths | Arrivals) -> int | None:
    """How many requests there is a record for; None: nothing is recorded."""
    recorded = [
        len(source.lengths) if isinstance(source, RecordedLengths) else len(source.times)
        for source in sources
        if isinstance(source, (RecordedLengths, RecordedArrivals))
    ]
    return min(recorded, default=None)
