"""The tables (Markdown) and the plot of variance.py."""

from __future__ import annotations

from typing import Any

from chart import Line, Panel, line_chart
from machine import QUIET_CORES
from script import POLICIES

# How the tables call it, unit factor, format.
FIGURES = {
    "mean_occupancy": ("slots busy, %", 1e2, ".0f"),
    "mean_kv_use": ("KV used, %", 1e2, ".0f"),
    "ttft_p50": ("TTFT p50, s", 1, ".2f"),
    "ttft_p99": ("TTFT p99, s", 1, ".2f"),
    "latency_p50": ("latency p50, s", 1, ".2f"),
    "latency_p99": ("latency p99, s", 1, ".2f"),
    "inter_token_latency_p50": ("ITL p50, ms", 1e3, ".0f"),
    "inter_token_latency_p99": ("ITL p99, ms", 1e3, ".0f"),
    "num_preemptions": ("preempted", 1, ".0f"),
    "num_recomputed_tokens": ("tokens recomputed", 1, ".0f"),
}


def format_tables(result: dict[str, Any]) -> str:
    """Throughput of every cell, then all figures cap by cap."""
    machine, settings, summary = result["machine"], result["settings"], result["summary"]
    threads = settings["num_threads"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {settings['model']}, "
        f"{settings['dtype']}, {settings['isa']}, threads: {'default' if threads is None else threads}; "
        f"{settings['num_requests']} requests over {settings['max_num_seqs']} slots, "
        f"{settings['max_num_batched_tokens']} tokens a step, {settings['repeats']} runs",
        "",
        *_throughput_table(summary, settings["max_num_seqs"]),
    ]
    for cap in dict.fromkeys(cell["cap"] for cell in summary):
        lines += ["", *_details_table([cell for cell in summary if cell["cap"] == cap], settings["max_num_seqs"])]
    equal = "the same tokens" if result["outputs_equal"] else "NOT the same tokens"
    lines += ["", f"Every request had {equal} in all runs of its workload."]
    disturbed = [cell for cell in summary if not cell["num_quiet_runs"]]
    if disturbed:
        lines += [f"The machine was NOT quiet in any run of {len(disturbed)} of {len(summary)} cells."]
    else:
        lines += [f"Only quiet runs count: others used less than {QUIET_CORES} cores."]
    return "\n".join(lines)


def chart(result: dict[str, Any]) -> str:
    """Throughput over the cap, a panel per KV size, a line per policy, as SVG."""
    summary = result["summary"]
    caps = [str(cap) for cap in dict.fromkeys(cell["cap"] for cell in summary)]
    panels = []
    for share in dict.fromkeys(cell["kv_share"] for cell in summary):
        lines = []
        for policy in POLICIES:
            own = [cell for cell in summary if cell["policy"] == policy and cell["kv_share"] == share]
            lines.append(Line(policy, [tuple(cell["throughput"]) for cell in own]))
        panels.append(Panel(_kv_name(share, result["settings"]["max_num_seqs"]), lines))
    return line_chart(panels, caps, x_label="longest output allowed, tokens", y_label="output tokens/s")


def _throughput_table(summary: list[dict[str, Any]], max_num_seqs: int) -> list[str]:
    caps = list(dict.fromkeys(cell["cap"] for cell in summary))
    cells = {(cell["kv_share"], cell["policy"], cell["cap"]): cell["throughput"][0] for cell in summary}
    rows = []
    for share in dict.fromkeys(cell["kv_share"] for cell in summary):
        for policy in POLICIES:
            row = [_kv_name(share, max_num_seqs), f"`{policy}`"]
            for cap in caps:
                ratio = cells[share, policy, cap] / cells[share, "static", cap]
                row.append(f"{cells[share, policy, cap]:.0f} ({ratio:.2f}x)")
            rows.append(row)
    return [
        "Output tokens/s (against `static`), by the longest output allowed:",
        "",
        *_markdown(["KV cache", "policy", *map(str, caps)], rows),
    ]


def _details_table(cells: list[dict[str, Any]], max_num_seqs: int) -> list[str]:
    rows = []
    for cell in cells:
        row = [f"{_kv_name(cell['kv_share'], max_num_seqs)}, {cell['num_kv_blocks']} blocks", f"`{cell['policy']}`"]
        low, high = cell["throughput"][1:]
        row.append(f"{cell['throughput'][0]:.0f} [{low:.0f}-{high:.0f}]")
        row += [format(cell[key][0] * factor, show) for key, (_, factor, show) in FIGURES.items()]
        rows.append(row)
    header = ["KV cache", "policy", "output tokens/s", *(label for label, _, _ in FIGURES.values())]
    return [f"Outputs of up to {cells[0]['cap']} tokens:", "", *_markdown(header, rows)]


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _kv_name(share: float, max_num_seqs: int) -> str:
    """By how many of the slots it can hold at their longest."""
    return f"KV for {share * max_num_seqs:g} of {max_num_seqs} slots"
