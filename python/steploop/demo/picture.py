"""Draws which slots were busy when: as text, and as SVG. Empty space is a slot that had nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from steploop.demo.measure import Run

_SHADES = "█▓▒"

_WIDTH, _LABEL_WIDTH, _MARGIN = 960, 64, 16
_ROW_HEIGHT, _BAR_HEIGHT, _TITLE_HEIGHT, _AXIS_HEIGHT = 20, 16, 32, 28
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def assign_slots(spans: Sequence[tuple[float, float]], num_slots: int) -> list[int]:
    """Gives each span, in order of its start, the lowest slot that is free then. Returns each span's slot.

    More than `num_slots` slots come out where preempted requests overlap those that took their place.
    """
    slots = [0] * len(spans)
    free_from = [0.0] * num_slots
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        slot = next((i for i, time in enumerate(free_from) if time <= start), len(free_from))
        if slot == len(free_from):
            free_from.append(0.0)
        free_from[slot] = end
        slots[index] = slot
    return slots


def text_chart(run: Run, *, width: int, duration: float) -> list[str]:
    """One line for each slot, `width` characters for `duration` seconds; neighbours differ in shade."""
    slots = assign_slots(run.spans, run.num_slots)
    rows = [[" "] * width for _ in range(max([run.num_slots, *(slot + 1 for slot in slots)]))]
    num_seen = [0] * len(rows)
    for index in sorted(range(len(run.spans)), key=lambda i: run.spans[i]):
        start, end = run.spans[index]
        slot = slots[index]
        shade = _SHADES[num_seen[slot] % len(_SHADES)]
        num_seen[slot] += 1
        first = min(width - 1, int(start / duration * width))
        # At least one character, so that a short answer is seen at all.
        for column in range(first, min(width, max(first + 1, round(end / duration * width)))):
            rows[slot][column] = shade
    return ["".join(row) for row in rows]


def svg(runs: Sequence[Run], titles: Sequence[str], labels: Sequence[str]) -> str:
    """Both runs over the same time axis. `labels` names the requests, shown when the pointer rests on one."""
    duration = max(run.duration for run in runs)
    scale = (_WIDTH - _LABEL_WIDTH - _MARGIN) / duration
    parts: list[str] = []
    top = _MARGIN
    for run, title in zip(runs, titles, strict=True):
        slots = assign_slots(run.spans, run.num_slots)
        num_rows = max([run.num_slots, *(slot + 1 for slot in slots)])
        parts.append(f'<text x="{_MARGIN}" y="{top + 16}" class="title">{escape(title)}</text>')
        top += _TITLE_HEIGHT
        parts.append(
            f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{duration * scale:.1f}" height="{num_rows * _ROW_HEIGHT}" '
            'fill="#ffffff" stroke="#cccccc"/>'
        )
        for row in range(num_rows):
            parts.append(f'<text x="{_MARGIN}" y="{top + row * _ROW_HEIGHT + 14}">slot {row}</text>')
        for index, ((start, end), slot) in enumerate(zip(run.spans, slots, strict=True)):
            parts.append(
                f'<rect x="{_LABEL_WIDTH + start * scale:.1f}" y="{top + slot * _ROW_HEIGHT + 2}" '
                f'width="{max(1.0, (end - start) * scale):.1f}" height="{_BAR_HEIGHT}" stroke="#ffffff" '
                f'fill="{_COLOURS[index % len(_COLOURS)]}"><title>{escape(labels[index])}</title></rect>'
            )
        top += num_rows * _ROW_HEIGHT + _MARGIN
    parts += _axis(duration, scale, top)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top + _AXIS_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {top + _AXIS_HEIGHT}">',
            "<style>text { font: 11px sans-serif; fill: #333333 } .title { font: bold 14px sans-serif }</style>",
            '<rect width="100%" height="100%" fill="#fafafa"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _axis(duration: float, scale: float, top: float) -> list[str]:
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120) if duration / s <= 12), 600)
    ticks = [index * step for index in range(int(duration / step) + 1)]
    return [
        f'<text x="{_LABEL_WIDTH + tick * scale:.1f}" y="{top + 8}" text-anchor="middle">{tick:g} s</text>'
        for tick in ticks
    ]
