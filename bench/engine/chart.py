"""Draws line charts as SVG: panels side by side with one scale, named positions on the x axis, ranges as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_COLOURS = ("#888888", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by the colour-blind too
_DASHES = ("6 4", "none", "none", "2 3", "8 3 2 3", "4 2")
_PANEL_WIDTH, _PLOT_HEIGHT, _GAP = 250, 220, 24
_LEFT, _TOP, _BOTTOM, _RIGHT = 64, 64, 52, 16


class Line(NamedTuple):
    """A named line: at each position a (median, smallest, largest)."""

    name: str
    points: Sequence[tuple[float, float, float]]


class Panel(NamedTuple):
    """A plot of its own."""

    title: str
    lines: Sequence[Line]


def line_chart(panels: Sequence[Panel], positions: Sequence[str], *, x_label: str, y_label: str) -> str:
    """The chart as an SVG file's text."""
    ticks = _ticks(max(point[2] for panel in panels for line in panel.lines for point in line.points))
    width = _LEFT + len(panels) * (_PANEL_WIDTH + _GAP) - _GAP + _RIGHT
    height = _TOP + _PLOT_HEIGHT + _BOTTOM
    middle = _TOP + _PLOT_HEIGHT // 2
    size = f'width="{width}" height="{height}"'
    parts = [
        *_legend([line.name for line in panels[0].lines]),
        f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" text-anchor="middle">{escape(y_label)}</text>',
        f'<text x="{(_LEFT + width - _RIGHT) / 2:g}" y="{height - 12}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, positions, ticks, left=_LEFT + index * (_PANEL_WIDTH + _GAP), with_numbers=index == 0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
            "<style>text { font: 12px sans-serif; fill: #333333 } .title { font-weight: bold }</style>",
            '<rect width="100%" height="100%" fill="#fafafa"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    left = _LEFT
    for index, name in enumerate(names):
        parts.append(f'<path d="M{left} 20h24" {_stroke(index)}/>')
        parts.append(f'<text x="{left + 30}" y="24">{escape(name)}</text>')
        left += 50 + 8 * len(name)
    return parts


def _panel(
    panel: Panel, positions: Sequence[str], ticks: Sequence[float], *, left: float, with_numbers: bool
) -> list[str]:
    bottom = _TOP + _PLOT_HEIGHT

    def x_of(index: int) -> float:
        return left + _PANEL_WIDTH * (index + 0.5) / len(positions)

    def y_of(value: float) -> float:
        return bottom - _PLOT_HEIGHT * value / ticks[-1]

    parts = [f'<text x="{left}" y="{_TOP - 10}" class="title">{escape(panel.title)}</text>']
    for tick in ticks:
        parts.append(f'<path d="M{left} {y_of(tick):.1f}h{_PANEL_WIDTH}" stroke="#dddddd"/>')
        if with_numbers:
            parts.append(f'<text x="{left - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, name in enumerate(positions):
        parts.append(f'<text x="{x_of(index):.1f}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>')
    for number, line in enumerate(panel.lines):
        path = "L".join(f"{x_of(i):.1f} {y_of(point[0]):.1f}" for i, point in enumerate(line.points))
        parts.append(f'<path d="M{path}" {_stroke(number)}/>')
        for i, (value, low, high) in enumerate(line.points):
            x, colour = x_of(i), _COLOURS[number % len(_COLOURS)]
            parts.append(f'<path d="M{x:.1f} {y_of(low):.1f}V{y_of(high):.1f}" stroke="{colour}"/>')
            tip = escape(f"{line.name}, {positions[i]}: {value:.0f} [{low:.0f}-{high:.0f}]")
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(value):.1f}" r="3.5" fill="{colour}">')
            parts.append(f"<title>{tip}</title></circle>")
    return parts


def _stroke(index: int) -> str:
    colour, dashes = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    return f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'


def _ticks(highest: float) -> list[float]:
    """From 0 to past the highest value, four to nine round steps."""
    step = next(s for s in _round_steps(highest) if highest / s <= 8)
    return [step * index for index in range(math.ceil(highest / step) + 1)]


def _round_steps(highest: float) -> list[float]:
    power = 10.0 ** (math.floor(math.log10(highest)) - 1)
    return [power * factor for factor in (1, 2, 5, 10, 20, 50)]
