"""Sums up the runs of offline.py: medians, ranges, and whether the machine was quiet."""

from __future__ import annotations

from statistics import median
from typing import Any

from machine import QUIET_CORES, disturbers

Run = dict[str, Any]

# Key, how the table calls it, unit factor, format.
_FIGURES = [
    ("throughput", "output tokens/s", 1, ".1f"),
    ("ttft_p50", "time to first token p50, s", 1, ".2f"),
    ("ttft_p99", "time to first token p99, s", 1, ".2f"),
    ("inter_token_latency_p50", "inter-token latency p50, ms", 1e3, ".1f"),
    ("inter_token_latency_p99", "inter-token latency p99, ms", 1e3, ".1f"),
    ("tpot_p50", "time per output token p50, ms", 1e3, ".1f"),
    ("tpot_p99", "time per output token p99, ms", 1e3, ".1f"),
    ("mean_occupancy", "mean batch occupancy, %", 1e2, ".0f"),
    ("kv_tail_waste", "KV held by block tails, %", 1e2, ".2f"),
    ("num_preemptions", "preemptions", 1, ".0f"),
    ("num_steps", "steps", 1, ".0f"),
]


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Per workload: the figures as [median, min, max]."""
    return {
        workload: figures([run for run in runs if run["workload"] == workload])
        for workload in dict.fromkeys(run["workload"] for run in runs)
    }


def disturbances(runs: list[Run]) -> list[str]:
    """What took processor time from a run: others, other virtual machines, or an engine that should have idled."""
    found = []
    for run in runs:
        for name in disturbers(run["cores"], run["engine"]):
            cores = run["cores"][name]
            found.append(f"{run['workload']}, {run['engine']}, run {run['repeat'] + 1}: {name} used {cores:.2f} cores")
    return found


def format_report(result: dict[str, Any]) -> str:
    """The tables that a person reads."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        f"{settings['model']}, {settings['dtype']}, max_num_seqs {settings['max_num_seqs']}, "
        f"max_num_batched_tokens {settings['max_num_batched_tokens']}, policy {settings['policy']}",
    ]
    about = result["engine"]
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    rest = {key: value for key, value in about.items() if key not in ("versions", "load_seconds")}
    lines.append(f"{versions}; " + ", ".join(f"{key} {value}" for key, value in rest.items()))
    for workload, entry in result["summary"].items():
        lines += ["", *_table(workload, entry)]
    return "\n".join([*lines, "", *quietness(disturbances(result["runs"]))])


def quietness(found: list[str]) -> list[str]:
    """Whether the machine was quiet, in words; `found`: the disturbances."""
    if found:
        return ["The machine was NOT quiet; take these figures with care:", *(f"  {line}" for line in found)]
    return [f"The machine was quiet: others used less than {QUIET_CORES} cores during every run."]


def _table(workload: str, entry: dict[str, list[float]]) -> list[str]:
    num_requests, num_output_tokens = (entry[key][0] for key in ("num_requests", "num_output_tokens"))
    lines = [f"{workload}: {num_requests:.0f} requests, {num_output_tokens:.0f} output tokens"]
    lines.append(f"  {'':32}{'median [min-max]':>26}")
    for key, label, factor, show in _FIGURES:
        if key in entry:
            lines.append(f"  {label:32}{cell(entry[key], factor, show):>26}")
    return lines


def cell(figure: list[float], factor: float, show: str) -> str:
    """A median and its range, times the factor, in the format."""
    middle, low, high = (format(value * factor, show) for value in figure)
    return middle if low == high else f"{middle} [{low}-{high}]"


def figures(runs: list[Run]) -> dict[str, list[float]]:
    """Each figure of some runs as [median, min, max]."""
    keys = ["num_requests", "num_output_tokens", "duration", *(key for key, *_ in _FIGURES if key in runs[0])]
    return {key: spread([run[key] for run in runs]) for key in keys}


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [median(values), min(values), max(values)]
