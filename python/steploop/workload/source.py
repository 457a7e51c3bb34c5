"""WorkloadSource: what the workload options of a command ask for, checked and ready to draw from."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from steploop.checks import check_positive
from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import Arrivals, RecordedArrivals
from steploop.workload.columns import Segments, Workload
from steploop.workload.conversations import Conversations, ThinkTime
from steploop.workload.draw import draw_workload
from steploop.workload.files import read_lengths
from steploop.workload.lengths import Fixed, Lengths, RecordedLengths
from steploop.workload.ranks import Ranks
from steploop.workload.specs import (
    parse_arrivals,
    parse_lengths,
    parse_ranks,
    parse_shared_prefix,
    parse_think_time,
)
from steploop.workload.workload_file import RecordedWorkload, read_workload

DEFAULT_PROMPT_LENGTHS = "uniform:32:256"
DEFAULT_OUTPUT_LENGTHS = "exponential:64:256:clip"
DEFAULT_NUM_REQUESTS = 100

_SPEC_NAMES = (
    "prompt_lengths",
    "output_lengths",
    "lengths_file",
    "arrivals",
    "rate_sweep",
    "workload_file",
    "skip_empty",
    "speedup",
    "turns",
    "think_time",
    "max_conversation_tokens",
    "shared_prefix",
    "tenants",
    "priorities",
    "seed",
)
"""Options that are kept for reports."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSource:
    """What workloads are drawn from."""

    lengths: tuple[Lengths, Lengths]
    """Of prompts and of outputs."""
    arrivals: Arrivals
    num_requests: int = DEFAULT_NUM_REQUESTS
    seed: int = 0
    conversations: Conversations | None = None
    recorded_segments: Segments | None = None
    tenants: Ranks | None = None
    priorities: Ranks | None = None
    num_skipped: int = 0
    """Recorded requests that were left out."""
    num_recorded: int | None = None
    """No more can be drawn; None: nothing is recorded, and any number can."""
    rates: tuple[float | None, ...] = (None,)
    """A workload is asked for with each; None: that of the arrivals."""
    specs: dict[str, Any] = field(default_factory=dict)
    """The options that say so, for reports."""

    def draw(self, num_requests: int | None = None, *, seed: int | None = None, rate: float | None = None) -> Workload:
        """A workload; the same for the same numbers. What is None is as the options say.

        Raises:
            InvalidArgumentError: as draw_workload; and a rate for arrivals that have none.
        """
        workload = draw_workload(
            self.num_requests if num_requests is None else num_requests,
            lengths=self.lengths,
            arrivals=self.arrivals if rate is None else self.arrivals.with_rate(rate),
            seed=self.seed if seed is None else seed,
            conversations=self.conversations,
            recorded_segments=self.recorded_segments,
            tenants=self.tenants,
            priorities=self.priorities,
        )
        return dataclasses.replace(workload, num_skipped=self.num_skipped)


def workload_source(arguments: argparse.Namespace) -> WorkloadSource:
    """Of what `add_workload_arguments` has read.

    Raises:
        InvalidArgumentError: an option that cannot be, alone or with another; an unreadable file, or a bad line of it.
    """
    specs = {name: getattr(arguments, name, None) for name in _SPEC_NAMES}
    recorded = None
    if specs["workload_file"] is not None:
        recorded = read_workload(specs["workload_file"], skip_empty=bool(specs["skip_empty"]))
    elif specs["skip_empty"]:
        raise InvalidArgumentError("--skip-empty is for a --workload-file")
    lengths = _lengths(specs, recorded)
    arrivals = _arrivals(specs, recorded)
    num_recorded = _num_recorded(*lengths, arrivals)
    num_requests = arguments.num_requests
    if num_requests is None:
        num_requests = num_recorded or DEFAULT_NUM_REQUESTS
    return WorkloadSource(
        lengths=lengths,
        arrivals=arrivals,
        num_requests=num_requests,
        seed=arguments.seed,
        conversations=_conversations(specs),
        recorded_segments=None if recorded is None else recorded.segments,
        tenants=_ranks(specs, "tenants"),
        priorities=_ranks(specs, "priorities"),
        num_skipped=0 if recorded is None else recorded.num_skipped,
        num_recorded=num_recorded,
        rates=_rates(specs, arrivals),
        specs=specs,
    )


def _lengths(specs: dict[str, Any], recorded: RecordedWorkload | None) -> tuple[Lengths, Lengths]:
    if recorded is not None:
        _refuse_with("--workload-file", specs, "prompt_lengths", "output_lengths", "lengths_file")
        return recorded.lengths
    if specs["lengths_file"] is not None:
        if specs["prompt_lengths"] is not None or specs["output_lengths"] is not None:
            raise InvalidArgumentError("give --lengths-file, or --prompt-lengths and --output-lengths, not both")
        return read_lengths(specs["lengths_file"])
    # So that the report says what was drawn from.
    specs["prompt_lengths"] = specs["prompt_lengths"] or DEFAULT_PROMPT_LENGTHS
    specs["output_lengths"] = specs["output_lengths"] or DEFAULT_OUTPUT_LENGTHS
    return parse_lengths(specs["prompt_lengths"]), parse_lengths(specs["output_lengths"])


def _arrivals(specs: dict[str, Any], recorded: RecordedWorkload | None) -> Arrivals:
    if specs["arrivals"] is None and recorded is not None:
        arrivals: Arrivals = recorded.arrivals
    else:
        if specs["arrivals"] is None:
            specs["arrivals"] = "burst" if specs["rate_sweep"] is None else "poisson:1"
        arrivals = parse_arrivals(specs["arrivals"])
    if specs["speedup"] is None:
        return arrivals
    if not isinstance(arrivals, RecordedArrivals):
        raise InvalidArgumentError(f"--speedup is for recorded times, got arrivals of {specs['arrivals']}")
    return dataclasses.replace(arrivals, speedup=specs["speedup"])


def _conversations(specs: dict[str, Any]) -> Conversations | None:
    if specs["workload_file"] is not None:
        _refuse_with("--workload-file", specs, "turns", "shared_prefix", "think_time", "max_conversation_tokens")
    if specs["turns"] is None:
        for name in ("think_time", "max_conversation_tokens"):
            if specs[name] is not None:
                raise InvalidArgumentError(f"{_option(name)} is for conversations: give --turns")
        if specs["shared_prefix"] is None:
            return None
    if specs["max_conversation_tokens"] is not None and specs["lengths_file"] is not None:
        raise InvalidArgumentError("--max-conversation-tokens is for lengths that are drawn, not for a --lengths-file")
    num_system_tokens, groups = 0, Ranks(1)
    if specs["shared_prefix"] is not None:
        num_system_tokens, groups = parse_shared_prefix(specs["shared_prefix"])
    return Conversations(
        turns=Fixed(1) if specs["turns"] is None else parse_lengths(specs["turns"]),
        think_time=ThinkTime() if specs["think_time"] is None else parse_think_time(specs["think_time"]),
        num_system_tokens=num_system_tokens,
        groups=groups,
        max_tokens=specs["max_conversation_tokens"],
    )


def _ranks(specs: dict[str, Any], name: str) -> Ranks | None:
    return None if specs[name] is None else parse_ranks(name, specs[name])


def _refuse_with(option: str, specs: dict[str, Any], *names: str) -> None:
    for name in names:
        if specs[name] is not None:
            raise InvalidArgumentError(f"{_option(name)} cannot be given with {option}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rates(specs: dict[str, Any], arrivals: Arrivals) -> tuple[float | None, ...]:
    if specs["rate_sweep"] is None:
        return (None,)
    if arrivals.mean_rate is None:
        given = specs["arrivals"] or f"those of {specs['workload_file']}"
        raise InvalidArgumentError(f"--rate-sweep needs arrivals that have a rate, got {given}")
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
