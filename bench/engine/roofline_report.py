"""The tables of roofline.py."""

from __future__ import annotations

from typing import Any

from machine import QUIET_CORES, disturbers
from roofline_model import Line

LINEAR_OR_ATTENTION = ("linear_", "attention")
"""Where a step should spend its time."""


def format_report(result: dict[str, Any]) -> str:
    """All that a person reads."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; kernels: {result['isa']}",
        "",
        *_peak_table(result["peaks"]),
    ]
    if result["kernels"]:
        lines += ["", "kernels beside these peaks", *_share_table(_kernel_cases(result["kernels"]))]
    steps = [
        (f"{name}, batch {row['batch']}, context {row['context']:.0f}", row)
        for name, of_format in result["engines"].items()
        for row in of_format["steps"]
    ]
    if steps:
        lines += ["", f"decode steps of {settings['model']}, weights by format", *_share_table(steps)]
    for name, of_format in result["engines"].items():
        lines += _scaling_lines(name, of_format)
    for name, of_format in result["engines"].items():
        if "profiles" in of_format:
            lines += ["", *_profile_table(name, of_format)]
    for name, of_format in result["engines"].items():
        if "contexts" in of_format:
            lines += ["", *_context_lines(name, of_format)]
    lines += ["", *_quiet_lines(result["cores_of_others"])]
    return "\n".join(lines)


def _peak_table(peaks: dict[str, dict[str, dict[int, float]]]) -> list[str]:
    """Side by side the peaks probed around each part of the run."""
    columns = [
        (part, count)
        for part, rates in peaks.items()
        for count in sorted({count for by_threads in rates.values() for count in by_threads})
    ]
    lines = [
        f"{'peaks probed around':40}" + "".join(f"{part:>14}" for part, _ in columns),
        " " * 40 + "".join(f"{_num_threads(count):>14}" for _, count in columns),
    ]
    for probe in dict.fromkeys(probe for rates in peaks.values() for probe in rates):
        unit = "GB/s" if probe.startswith("read_") else "Gop/s"
        cells = [peaks[part].get(probe, {}).get(count) for part, count in columns]
        lines.append(
            f"{probe:34}{unit:>6}" + "".join(f"{'-':>14}" if rate is None else f"{rate:14.1f}" for rate in cells)
        )
    return lines


def _kernel_cases(rows: list[Line]) -> list[tuple[str, Line]]:
    return [(row["kernel"], row) for row in rows]


def _share_table(cases: list[tuple[str, Line]]) -> list[str]:
    """A line for each name, side by side its figures by number of threads. Of a rate that the nearer limit holds down,
    the share is marked.
    """
    threads = sorted({row["num_threads"] for _, row in cases})
    names = list(dict.fromkeys(name for name, _ in cases))
    by_case = {(name, row["num_threads"]): row for name, row in cases}
    width = max(map(len, names))
    lines = [
        " " * width + "".join(f"{_num_threads(count):>46}" for count in threads),
        " " * width + f"{'µs':>12}{'GB/s':>8}{'of peak':>9}{'Gop/s':>8}{'of peak':>9}" * len(threads),
    ]
    for name in names:
        cells = [_share_cells(by_case.get((name, count))) for count in threads]
        lines.append(f"{name:{width}}" + "".join(cells))
    lines.append("*: the nearer limit")
    return lines


def _share_cells(row: Line | None) -> str:
    if row is None:
        return f"{'-':>12}{'-':>8}{'-':>9}{'-':>8}{'-':>9}"
    cells = f"{row['seconds'] * 1e6:12.1f}"
    for rate, share, limit in (
        ("gb_per_s", "memory_share", "memory"),
        ("gop_per_s", "arithmetic_share", "arithmetic"),
    ):
        if not row[rate]:
            cells += f"{'-':>8}{'-':>9}"
        elif row[share] is None:
            cells += f"{row[rate]:8.1f}{'-':>9}"
        else:
            cells += f"{row[rate]:8.1f}{row[share]:>7.0%}{'*' if row['limit'] == limit else ' ':2}"
    return cells


def _scaling_lines(name: str, of_format: dict[str, Any]) -> list[str]:
    lines = []
    for batch, scaling in of_format["scaling"].items():
        pairs = ", ".join(f"{ratio:.2f}" for ratio in scaling["pairs"])
        lines.append(
            f"{name}, batch {batch}: {of_format['num_threads']} threads are {scaling['ratio']:.2f}x as fast as one "
            f"(in turns: {pairs})"
        )
    return lines


def _profile_table(name: str, of_format: dict[str, Any]) -> list[str]:
    """Microseconds per step, means over the threads; below, what is no work on linear layers and attention."""
    profiles = of_format["profiles"]
    lines = [
        f"where a step goes: {name}, {_num_threads(of_format['num_threads'])}, µs and share of the step",
        f"{'':34}" + "".join(f"{'batch ' + str(profile['batch']):>22}" for profile in profiles),
    ]

    def add(label: str, values: list[float]) -> None:
        cells = [
            f"{value:14.1f}{value / profile['step_us']:>8.1%}" for value, profile in zip(values, profiles, strict=True)
        ]
        lines.append(f"{label:34}" + "".join(cells))

    operations = list(dict.fromkeys(name for profile in profiles for name in profile["operations"]))
    for operation in operations:
        calls = profiles[-1]["operations"][operation]["num_calls"]
        add(f"  {operation}, {calls:g} calls", [profile["operations"][operation]["working_us"] for profile in profiles])
    num_barriers = sum(times["num_barriers"] for times in profiles[-1]["operations"].values())
    waiting = [sum(times["waiting_us"] for times in profile["operations"].values()) for profile in profiles]
    add(f"  waiting at {num_barriers:g} barriers", waiting)
    add("  threads starting and ending", [profile["fork_join_us"] for profile in profiles])
    for part in ("schedule", "build", "update", "python", "other"):
        add(f"  {part}, by one thread", [profile[f"{part}_us"] for profile in profiles])
    add("step", [profile["step_us"] for profile in profiles])
    add("no work on linear or attention", [outside_us(profile) for profile in profiles])
    add("  without waits in their barriers", [outside_us(profile, count_own_waits=False) for profile in profiles])
    return lines


def outside_us(profile: Line, *, count_own_waits: bool = True) -> float:
    """Time per step in which threads do not work on linear layers or attention; with or without what they wait for each
    other at the barriers that these end with.
    """
    inside = 0.0
    for name, times in profile["operations"].items():
        if name.startswith(LINEAR_OR_ATTENTION):
            inside += times["working_us"] + (0.0 if count_own_waits else times["waiting_us"])
    return float(profile["step_us"]) - inside


def _context_lines(name: str, of_format: dict[str, Any]) -> list[str]:
    contexts = of_format["contexts"]
    lines = [f"growth with the tokens in the cache: {name}, {_num_threads(of_format['num_threads'])}"]
    for kind, label in (("decode", "decode step of one sequence"), ("prompt", "prompt chunk of 512 tokens")):
        points = ", ".join(f"{context:.0f}: {seconds * 1e3:.2f}" for context, seconds in contexts[kind])
        lines.append(f"  {label}, ms by tokens: {points}")
        if fit := contexts.get(f"{kind}_fit"):
            lines.append(
                f"    {fit['at_zero'] * 1e3:.2f} ms + {fit['slope'] * 1e6:.3f} ms per 1000 tokens, "
                f"R² {fit['r_squared']:.4f}, at most {fit['largest_deviation']:.1%} off the line"
            )
    return lines


def _quiet_lines(cores_of_others: dict[str, dict[str, float]]) -> list[str]:
    found = [
        f"  {part}: {name} used {cores[name]:.2f} cores"
        for part, cores in cores_of_others.items()
        for name in disturbers(cores, "")
    ]
    if found:
        return ["The machine was NOT quiet; take these figures with care:", *found]
    return [f"The machine was quiet: others used less than {QUIET_CORES} cores."]


def _num_threads(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")
