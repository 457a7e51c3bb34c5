"""Pictures of simulations: slots and KV use over time, and how figures depend on what was swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steploop.loadtest.plot import save_figure
from steploop.simulation.simulation import SimulationResult

_PANEL_INCHES = (9.0, 3.2)
_MOST_SLOTS = 128  # of a picture of slots
_MOST_TIMELINES = 6  # of a sweep's

Runs = Sequence[tuple[dict[str, Any], SimulationResult]]


def write_plot(path: Path, title: str, runs: Runs) -> None:
    """Draws simulations, each with its figures, into a file of the path's kind.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    from matplotlib.figure import Figure

    panels: list[Any] = []
    if len(runs) > 1:
        panels += [_draw_latencies, _draw_throughput]
    elif _can_draw_slots(runs[0][1]):
        panels.append(_draw_slots)
    panels += [_draw_occupancy, _draw_kv_use]
    figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * len(panels)), layout="constrained")
    figure.suptitle(title)
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        panel(axes, runs)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    save_figure(figure, path, title)


def draw_slots(axes: Any, result: SimulationResult, *, until: float | None = None) -> None:
    """Which places of the batch were taken when, one line a place; white is a place that had nothing to do.

    Args:
        until: Seconds to draw; what begins later is left out. Default: to the end.
    """
    spans = result.raw["spans"]
    began, ended = spans["began_us"] / 1e6, spans["ended_us"] / 1e6
    slots = _slots(began, ended)
    last = result.duration if until is None else until
    for parity, colour in ((0, "#4e79a7"), (1, "#a0cbe8")):
        chosen = np.flatnonzero((spans["request"] % 2 == parity) & (began < last))
        axes.barh(
            slots[chosen],
            ended[chosen] - began[chosen],
            left=began[chosen],
            height=0.9,
            color=colour,
            edgecolor="none",
            align="edge",
        )
    axes.set(xlabel="s", ylabel="slot", title="Slots of the batch", ylim=(0, max(result.max_num_seqs, slots.max() + 1)))
    axes.set_xlim(0, last)


def _can_draw_slots(result: SimulationResult) -> bool:
    return bool(len(result.raw["spans"]["request"])) and result.max_num_seqs <= _MOST_SLOTS and result.num_replicas == 1


def _draw_slots(axes: Any, runs: Runs) -> None:
    draw_slots(axes, runs[0][1])


def _slots(began: Any, ended: Any) -> Any:
    """The lowest slot that is free as each span begins."""
    slots = np.zeros(len(began), np.int64)
    free_from: list[float] = []
    for index in np.lexsort((ended, began)).tolist():
        slot = next((i for i, time in enumerate(free_from) if time <= began[index]), len(free_from))
        if slot == len(free_from):
            free_from.append(0.0)
        free_from[slot] = ended[index]
        slots[index] = slot
    return slots


def _draw_latencies(axes: Any, runs: Runs) -> None:
    positions, labels = _positions(runs)
    for name, title in (("ttft", "time to first token"), ("itl", "inter-token latency"), ("e2e", "end to end")):
        for quantile, dashes in (("p50", "-"), ("p99", "--")):
            values = [run["latencies"][name][quantile] for run, _ in runs]
            seconds = [np.nan if value is None else value for value in values]
            axes.plot(positions, seconds, dashes, marker="o", label=f"{title}, {quantile}")
    _label(axes, positions, labels)
    axes.set(ylabel="s", yscale="log", title="Latencies")


def _draw_throughput(axes: Any, runs: Runs) -> None:
    positions, labels = _positions(runs)
    for name, title in (("output_tokens_per_second", "output"), ("total_tokens_per_second", "in all")):
        axes.plot(positions, [run["throughput"][name] for run, _ in runs], marker="o", label=title)
    _label(axes, positions, labels)
    axes.set(ylabel="tokens/s", title="Throughput", ylim=(0, None))


def _positions(runs: Runs) -> tuple[list[float], list[str] | None]:
    values = [run["swept"] for run, _ in runs]
    if all(isinstance(value, (int, float)) for value in values):
        return [float(value) for value in values], None
    return [float(index) for index in range(len(values))], [str(value) for value in values]


def _label(axes: Any, positions: list[float], labels: list[str] | None) -> None:
    if labels is not None:
        axes.set_xticks(positions, labels)


def _draw_occupancy(axes: Any, runs: Runs) -> None:
    for run, result in runs[:_MOST_TIMELINES]:
        timeline = result.raw["timeline"]
        busy = np.maximum(timeline["busy_us"], 1)
        label = "" if run["swept"] is None else f"{run['swept']}: "
        times = timeline["began_us"] / 1e6
        axes.step(times, timeline["sequences_us"] / busy, where="post", label=f"{label}sequences in a step")
        if len(runs) == 1:
            axes.step(times, timeline["unfinished_us"] / busy, where="post", label="unfinished requests")
    axes.set(xlabel="s", title="Batch occupancy", ylim=(0, None))


def _draw_kv_use(axes: Any, runs: Runs) -> None:
    for run, result in runs[:_MOST_TIMELINES]:
        timeline = result.raw["timeline"]
        used = timeline["used_blocks_us"] / np.maximum(timeline["busy_us"], 1) / result.num_kv_blocks
        label = "KV blocks in use" if run["swept"] is None else f"{run['swept']}"
        axes.step(timeline["began_us"] / 1e6, used * 100, where="post", label=label)
    axes.set(xlabel="s", ylabel="%", title="KV cache in use", ylim=(0, 102))
