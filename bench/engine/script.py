"""What the scripts of this folder share: how they read arguments, speak to a person and leave their results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from machine import describe_machine

import steploop

RESULTS = Path(__file__).parents[1] / "results"
POLICIES = ("static", "reserve", "on_demand", "estimate")


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def say(text: str) -> None:
    """Tells how it is going; results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Into a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def describe_run(model: Path, args: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """What every result begins with: the machine, versions, and the settings of a run on a model."""
    common = {
        "model": model.name,  # a name, not where it lies
        "dtype": args.dtype,
        "num_threads": args.threads,
        "num_requests": args.num_requests,
        "repeats": args.repeats,
    }
    return {
        "machine": describe_machine(),
        "versions": {"steploop": steploop.__version__},
        "settings": common | settings,
    }


def add_wait_quiet(parser: argparse.ArgumentParser) -> None:
    """The option that says how long a measurement waits for others to finish."""
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=30,
        metavar="SECONDS",
        help="how long to wait for a quiet machine; default 30",
    )
