"""Pictures of runs: latency against the rate of arrivals, and what happened over time."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from steploop.errors import InvalidArgumentError
from steploop.loadtest.figures import in_flight
from steploop.loadtest.open_loop import RunResult

PLOT_SUFFIXES = (".svg", ".png", ".html")

_NUM_BINS = 120
_PANEL_INCHES = (9.0, 3.2)


def check_plot_path(text: str) -> Path:
    """Whether a picture can be drawn there.

    Raises:
        InvalidArgumentError: another kind of file, no such folder, or matplotlib is not installed.
    """
    path = Path(text)
    if path.suffix not in PLOT_SUFFIXES or not path.parent.is_dir():
        raise InvalidArgumentError(
            f"--plot must be a {', '.join(PLOT_SUFFIXES)} file in a folder that exists, got {text}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib; install it with: pip install 'steploop[bench]'")
    return path


def write_plot(path: Path, title: str, runs: Sequence[tuple[dict[str, Any], RunResult]]) -> None:
    """Draws runs, each with its figures, into a file of the path's kind.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [_draw_latency_over_time, _draw_occupancy]
    if len(runs) > 1:
        panels.insert(0, _draw_latency_by_rate)
    figure = Figure(figsize=(_PANEL_INCHES[0], _PANEL_INCHES[1] * len(panels)), layout="constrained")
    figure.suptitle(title + ("" if not any(run["incomplete"] for run, _ in runs) else " (incomplete: interrupted)"))
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        panel(axes, runs)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path, title)


def save_figure(figure: Any, path: Path, title: str) -> None:
    """Writes a matplotlib figure into a file of the path's kind; the same figure gives the same bytes.

    Raises:
        InvalidArgumentError: it cannot be written.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "steploop"}):
        if path.suffix == ".png":
            figure.savefig(buffer, format="png")
        else:
            figure.savefig(buffer, format="svg", metadata={"Date": None})
    content = buffer.getvalue()
    if path.suffix == ".html":
        content = _as_html(title, content.decode())
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidArgumentError(f"--plot {path} cannot be written: {error.strerror}") from None


def _draw_latency_by_rate(axes: Any, runs: Sequence[tuple[dict[str, Any], RunResult]]) -> None:
    rates = [run["rate"] for run, _ in runs]
    for name, title in (("ttft", "time to first token"), ("itl", "inter-token latency"), ("e2e", "end to end")):
        for quantile, dashes in (("p50", "-"), ("p99", "--")):
            values = [run["latencies"][name][quantile] for run, _ in runs]
            # NaN leaves a gap where a rate has no such figure.
            seconds = [np.nan if value is None else value for value in values]
            axes.plot(rates, seconds, dashes, marker="o", label=f"{title}, {quantile}")
    axes.set(xlabel="rate of arrivals, requests/s", ylabel="s", yscale="log", title="Latency against rate")


def _draw_latency_over_time(axes: Any, runs: Sequence[tuple[dict[str, Any], RunResult]]) -> None:
    for run, result in runs:
        gaps = [gap for record in result.records if record.state == "completed" for gap in record.gaps()]
        times = np.array([time - result.start_time for time, _, _ in gaps])
        latencies = np.array([seconds / count for _, seconds, count in gaps])
        edges = np.linspace(0, result.duration, _NUM_BINS + 1)
        bins = np.clip(np.digitize(times, edges) - 1, 0, _NUM_BINS - 1)
        filled = np.unique(bins)
        middles = (edges[filled] + edges[filled + 1]) / 2
        for share, dashes in ((50, "-"), (99, ":")):
            values = [np.percentile(latencies[bins == one], share) for one in filled]
            axes.plot(middles, values, dashes, label=f"{_label(run)}p{share}")
    axes.set(xlabel="s since the start", ylabel="s", title="Inter-token latency over time", ylim=(0, None))


def _draw_occupancy(axes: Any, runs: Sequence[tuple[dict[str, Any], RunResult]]) -> None:
    for run, result in runs:
        changes = in_flight(result.records, result.end_time)
        times = [time - result.start_time for time, _ in changes]
        axes.step(times, [number for _, number in changes], where="post", label=f"{_label(run)}requests in flight")
        if result.target.iterations:
            axes.plot(
                [iteration["timestamp"] - result.start_time for iteration in result.target.iterations],
                [iteration["num_scheduled_requests"] for iteration in result.target.iterations],
                ".",
                markersize=2,
                label=f"{_label(run)}sequences in a step",
            )
    axes.set(xlabel="s since the start", title="Batch occupancy", ylim=(0, None))


def _label(run: dict[str, Any]) -> str:
    return "" if run["rate"] is None else f"{run['rate']:g}/s: "


def _as_html(title: str, svg: str) -> bytes:
    drawing = svg[svg.index("<svg") :]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>\n'
        f"<body>\n{drawing}\n</body></html>\n"
    ).encode()
