"""The report for people: tables of a run's figures and of a sweep, and the warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steploop.reporting import in_ms, say

_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "chunk_gap": "gap between chunks",
    "e2e": "end to end",
}
_QUANTILES = ("mean", "p50", "p90", "p99", "max")


def print_workload(console: Console, summary: dict[str, Any]) -> None:
    """What was drawn."""
    for name, title in (("prompt_tokens", "prompts"), ("output_tokens", "outputs")):
        lengths = summary[name]
        say(
            console,
            f"{title}: {lengths['count']}, tokens: mean {lengths['mean']:.1f}, p50 {lengths['p50']:g}, "
            f"p90 {lengths['p90']:g}, p99 {lengths['p99']:g}, max {lengths['max']}",
        )
    arrivals = summary["arrivals"]
    if arrivals["rate"] is None:
        say(console, "arrivals: all at once")
    else:
        spread = arrivals["coefficient_of_variation"]
        say(
            console,
            f"arrivals: {arrivals['rate']:.3g}/s over {arrivals['duration']:.1f} s"
            + ("" if spread is None else f", gaps' coefficient of variation {spread:.2f}")
            + (f", {arrivals['burst_share']:.0%} of arrivals in bursts" if "burst_share" in arrivals else ""),
        )
    for line in _further_lines(summary):
        say(console, line)
    say(console, f"fingerprint: {summary['fingerprint']} (the same for the same workload)")


def _further_lines(summary: dict[str, Any]) -> list[str]:
    """About what not every workload has."""
    lines = []
    if (conversations := summary.get("conversations")) is not None:
        lines.append(
            f"conversations: {conversations['count']}, turns: mean {conversations['mean_turns']:.1f}, "
            f"max {conversations['max_turns']}"
        )
    if (known := summary.get("known_prompt_tokens")) is not None:
        lines.append(f"prompt tokens that an earlier request had: {known['share']:.1%}")
    for name in ("tenants", "priorities"):
        if (figures := summary.get(name)) is not None:
            lines.append(f"{name}: {figures['count']}, the largest with {figures['largest_share']:.1%} of the requests")
    if num_skipped := summary.get("num_skipped"):
        lines.append(f"recorded requests left out, without prompt or output tokens: {num_skipped}")
    return lines


def print_throughput(console: Console, throughput: dict[str, float]) -> None:
    """Requests and tokens a second."""
    say(
        console,
        f"throughput: {throughput['requests_per_second']:.3g} requests/s; tokens/s: "
        f"{throughput['input_tokens_per_second']:.1f} in, {throughput['output_tokens_per_second']:.1f} out, "
        f"{throughput['total_tokens_per_second']:.1f} in all",
    )


def print_run(console: Console, run: dict[str, Any]) -> None:
    """The figures of one run."""
    requests, client = run["requests"], run["client"]
    mark = "INCOMPLETE, interrupted: " if run["incomplete"] else ""
    say(
        console,
        f"\n{mark}{requests['completed']} of {requests['asked']} requests completed in {run['duration']:.2f} s; "
        f"{requests['failed']} failed, {requests['unfinished']} unfinished, {requests['not_sent']} not sent",
        style="bold",
    )
    for kind, error in run["errors"].items():
        say(console, f"  {kind}: {error['count']}, such as: {error['example']}")
    print_throughput(console, run["throughput"])
    if (goodput := run["goodput"]) is not None:
        limits = ", ".join(f"{name} {limit:g} s" for name, limit in goodput["slo"].items())
        say(
            console,
            f"goodput: {goodput['requests_per_second']:.3g} requests/s; {goodput['num_good']} of {requests['asked']} "
            f"({goodput['share_of_asked']:.1%}) within {limits}",
        )
    console.print(_latency_table(run))
    say(console, _lengths_line(run["lengths"]))
    in_flight = run["in_flight"]
    say(console, f"in flight: mean {in_flight['mean']:.1f}, max {in_flight['max']} requests")
    if (steps := run["steps"]) is not None and steps["count"]:
        say(
            console,
            f"steps: {steps['count']}, scheduled sequences: mean {steps['mean_scheduled']:.1f}, "
            f"max {steps['max_scheduled']}; {steps['num_preemptions']} preemptions",
        )
    say(
        console,
        f"client: {client['cpu_share']:.0%} of a core, event loop late by {in_ms(client['loop_lag']['p99'])} ms (p99), "
        f"requests by {in_ms(client['lateness']['p99'])} ms (p99); wait for the concurrency limit: "
        f"{in_ms(client['concurrency_wait']['mean'])} ms (mean)",
    )
    for warning in run["warnings"]:
        say(console, f"warning: {warning}", style="yellow")


def print_sweep(console: Console, runs: Sequence[dict[str, Any]]) -> None:
    """A line for each rate."""
    table = Table(title="By rate of arrivals; milliseconds, p50 / p99")
    with_goodput = runs[0]["goodput"] is not None
    titles = ["rate/s", "completed", "requests/s", "tokens/s out", "TTFT", "ITL", "end to end", "in flight"]
    for title in [*titles, *(["goodput/s"] if with_goodput else [])]:
        table.add_column(title, justify="right")
    for run in runs:
        latencies = run["latencies"]
        cells = [
            f"{run['rate']:g}" + (" (incomplete)" if run["incomplete"] else ""),
            f"{run['requests']['completed']}/{run['requests']['asked']}",
            f"{run['throughput']['requests_per_second']:.3g}",
            f"{run['throughput']['output_tokens_per_second']:.1f}",
            *(f"{in_ms(latencies[name]['p50'])} / {in_ms(latencies[name]['p99'])}" for name in ("ttft", "itl", "e2e")),
            f"{run['in_flight']['mean']:.1f}",
        ]
        table.add_row(*cells, *([f"{run['goodput']['requests_per_second']:.3g}"] if with_goodput else []))
    console.print(table)


def _latency_table(run: dict[str, Any]) -> Table:
    table = Table(title="Milliseconds, counted from when a request was due")
    table.add_column("")
    for title in (*_QUANTILES, "of", "missing"):
        table.add_column(title, justify="right")

    def row(title: str, figures: dict[str, Any]) -> None:
        cells = [in_ms(figures[name]) for name in _QUANTILES]
        table.add_row(Text(title), *cells, str(figures["count"]), str(figures["num_missing"]))

    for name, title in _LATENCIES.items():
        row(title, run["latencies"][name])
    row("queue time", run["queue_time"])
    table.caption = f"Missing: requests without. Queue time: {run['queue_time']['source']}."
    return table


def _lengths_line(lengths: dict[str, Any]) -> str:
    def mean(name: str) -> str:
        figures = lengths[name]
        return f"{figures['mean']:.1f}" if figures["count"] else "unknown"

    return (
        f"mean tokens, asked and got: prompts {mean('prompt_asked')} and {mean('prompt_got')}, outputs "
        f"{mean('output_asked')} and {mean('output_got')}; {lengths['num_truncated']} outputs truncated"
    )
