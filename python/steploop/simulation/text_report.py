"""The report for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steploop.loadtest.text_report import print_throughput, print_workload
from steploop.memory import format_bytes
from steploop.reporting import in_ms, say
from steploop.simulation.settings import Settings

_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2e": "end to end",
}
_QUANTILES = ("mean", "p50", "p90", "p99", "max")


def print_settings(console: Console, settings: Settings) -> None:
    """What is simulated, with every factor of the cost model."""
    deployment = settings.deployment
    device = deployment.device
    say(
        console,
        f"{deployment.model.name} in {deployment.weight_dtype}, {format_bytes(deployment.weight_bytes)} of weights, "
        f"{deployment.kv_bytes_per_token} KV bytes a token on each of "
        f"{deployment.tensor_parallel_size} x {device.name} "
        f"({device.bytes_per_second / 1e9:.4g} GB/s, {device.flops_per_second / 1e12:.4g} TFLOP/s); "
        f"{settings.num_replicas} replicas",
    )
    factors = ", ".join(f"{name} {value:.4g}" for name, value in settings.describe()["factors"].items())
    say(console, f"factors: {factors}")
    if settings.note is not None:
        say(console, f"note: {settings.note}", style="yellow")


def print_run(console: Console, run: dict[str, Any]) -> None:
    """The figures of one simulation."""
    print_workload(console, run["workload"])
    occupancy, cache = run["occupancy"], run["kv_cache"]
    requests, preemption, steps = run["requests"], run["preemption"], run["steps"]
    say(console, f"\n{requests['completed']} requests in {run['duration']:.2f} simulated seconds", style="bold")
    if requests["num_truncated"]:
        say(console, f"  {requests['num_truncated']} of them ended at max_model_len, before where they were drawn")
    print_throughput(console, run["throughput"])
    if (goodput := run["goodput"]) is not None:
        limits = ", ".join(
            f"{name} {limit:g} s ({goodput['share_within'][name]:.1%})" for name, limit in goodput["slo"].items()
        )
        say(
            console,
            f"goodput: {goodput['requests_per_second']:.3g} requests/s; {goodput['num_good']} of {requests['asked']} "
            f"({goodput['share_of_asked']:.1%}) within {limits}",
        )
    console.print(_latency_table(run))
    say(
        console,
        f"steps: {steps['count']}, mean {in_ms(steps['mean_duration'])} ms, at most {in_ms(steps['max_duration'])} ms; "
        f"busy {occupancy['share_of_time_busy']:.1%} of the time",
    )
    say(
        console,
        f"batch: {occupancy['mean_sequences']:.1f} of {occupancy['max_num_seqs']} slots "
        f"({occupancy['share_of_slots']:.1%}); KV cache: {cache['mean_use']:.1%} of {cache['num_blocks']} blocks"
        + ("" if not cache["prefix_hit_rate"] else f", {cache['prefix_hit_rate']:.1%} of prompt tokens found in it"),
    )
    say(
        console,
        f"preemptions: {preemption['num_preemptions']}; tokens recomputed: {preemption['num_recomputed_tokens']}, "
        f"swapped out: {preemption['num_swapped_out_tokens']}",
    )


def print_sweep(console: Console, name: str, runs: Sequence[dict[str, Any]]) -> None:
    """A line for each value."""
    table = Table(title=f"By {name}; milliseconds, p50 / p99")
    with_goodput = runs[0]["goodput"] is not None
    titles = [
        name.replace("_", " "),
        "requests/s",
        "tokens/s out",
        "in all",
        "TTFT",
        "ITL",
        "end to end",
        "slots",
        "KV",
        "preempted",
    ]
    for title in [*titles, *(["goodput/s", "within"] if with_goodput else [])]:
        table.add_column(title, justify="right", overflow="fold")
    for run in runs:
        latencies = run["latencies"]
        cells = [
            f"{run['swept']}",
            f"{run['throughput']['requests_per_second']:.3g}",
            f"{run['throughput']['output_tokens_per_second']:.1f}",
            f"{run['throughput']['total_tokens_per_second']:.1f}",
            *(f"{in_ms(latencies[name]['p50'])} / {in_ms(latencies[name]['p99'])}" for name in ("ttft", "itl", "e2e")),
            f"{run['occupancy']['share_of_slots']:.0%}",
            f"{run['kv_cache']['mean_use']:.0%}",
            str(run["preemption"]["num_preemptions"]),
        ]
        if with_goodput:
            goodput = run["goodput"]
            cells += [f"{goodput['requests_per_second']:.3g}", f"{goodput['share_of_asked']:.1%}"]
        table.add_row(*cells)
    console.print(table)


def _latency_table(run: dict[str, Any]) -> Table:
    table = Table(title="Milliseconds, counted from arrival")
    table.add_column("")
    for title in (*_QUANTILES, "of"):
        table.add_column(title, justify="right")
    for name, title in _LATENCIES.items():
        _add_row(table, title, run["latencies"][name])
    _add_row(table, "queue time", run["queue_time"])
    return table


def _add_row(table: Table, title: str, figures: dict[str, Any]) -> None:
    table.add_row(Text(title), *(in_ms(figures[name]) for name in _QUANTILES), str(figures["count"]))
