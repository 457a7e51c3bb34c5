"""Sums up the runs of offline.py: medians, ratios pair by pair, and whether the machine was quiet."""

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
    """Per workload: each engine's figures as [median, min, max], and how the engines compare."""
    summary: dict[str, Any] = {}
    for workload in dict.fromkeys(run["workload"] for run in runs):
        by_engine: dict[str, list[Run]] = {}
        for run in runs:
            if run["workload"] == workload:
                by_engine.setdefault(run["engine"], []).append(run)
        entry: dict[str, Any] = {name: _figures(own) for name, own in by_engine.items()}
        if len(by_engine) == 2:
            entry["ratio"] = _ratio(*by_engine.values())
        summary[workload] = entry
    return summary


def disturbances(runs: list[Run]) -> list[str]:
    """What took processor time from a run: others, other virtual machines, or the engine that should have idled."""
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
    for name, about in result["engines"].items():
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        rest = {key: value for key, value in about.items() if key not in ("versions", "environment", "load_seconds")}
        lines.append(f"{name}: {versions}; " + ", ".join(f"{key} {value}" for key, value in rest.items()))
    for workload, entry in result["summary"].items():
        lines += ["", *_table(workload, settings["workloads"][workload], entry)]
    found = disturbances(result["runs"])
    if found:
        lines += ["", "The machine was NOT quiet; take these figures with care:", *(f"  {line}" for line in found)]
    else:
        lines += ["", f"The machine was quiet: others used less than {QUIET_CORES} cores during every run."]
    return "\n".join(lines)


def _table(workload: str, options: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    names = [name for name in entry if name != "ratio"]
    lines = [
        f"{workload}: {options['num_requests']} requests, {entry[names[0]]['num_output_tokens'][0]:.0f} output tokens"
    ]
    lines.append(f"  {'median [min-max]':32}" + "".join(f"{name:>26}" for name in names))
    for key, label, factor, show in _FIGURES:
        if any(key in entry[name] for name in names):
            cells = [_cell(entry[name].get(key), factor, show) for name in names]
            lines.append(f"  {label:32}" + "".join(f"{cell:>26}" for cell in cells))
    if "ratio" in entry:
        ratio = entry["ratio"]
        pairs = ", ".join(f"{value:.2f}" for value in ratio["pairs"])
        lines.append(f"  {names[0]} / {names[1]}, pair by pair: {pairs}; median {ratio['median']:.2f}x")
        lines.append(f"  first tokens that agree: {ratio['first_tokens_equal']} of {ratio['num_requests']}")
    return lines


def _cell(figure: list[float] | None, factor: float, show: str) -> str:
    if figure is None:
        return "-"
    middle, low, high = (format(value * factor, show) for value in figure)
    return middle if low == high else f"{middle} [{low}-{high}]"


def _figures(runs: list[Run]) -> dict[str, list[float]]:
    keys = ["num_output_tokens", "duration", *(key for key, *_ in _FIGURES if key in runs[0])]
    return {key: spread([run[key] for run in runs]) for key in keys}


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [median(values), min(values), max(values)]


def _ratio(first: list[Run], second: list[Run]) -> dict[str, Any]:
    pairs = [a["throughput"] / b["throughput"] for a, b in zip(first, second, strict=True)]
    a, b = first[0]["first_token_ids"], second[0]["first_token_ids"]
    return {
        "pairs": pairs,
        "median": median(pairs),
        # That both run the same model on the same prompts; arithmetic that rounds differently may break a near tie.
        "first_tokens_equal": sum(x == y for x, y in zip(a, b, strict=True)),
        "num_requests": len(a),
    }
