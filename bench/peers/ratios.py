"""What a comparison found: entries of a JSON file by pair and workload, their ratios, and the table a person reads."""

from __future__ import annotations

from statistics import median
from typing import Any

from measure import SINGLE, STEPLOOP_SLOTS, Configuration, Outcome, Pair, Run
from report import cell, disturbances, figures, quietness, spread

Entry = dict[str, Any]

MAX_FAILURE_LINES = 10  # in the table; the file has all
_NOT_KEPT = ("first_token_ids", "workload")


def entry_name(pair: Pair, workload: str) -> str:
    """Its key in the file."""
    return f"{pair} {workload}"


def entries_of(pair: Pair, outcome: Outcome, common: dict[str, Any]) -> dict[str, Entry]:
    """One for each workload; `common`: machine and settings."""
    entries: dict[str, Entry] = {}
    for configuration in outcome.configurations:
        entry = entries.setdefault(
            entry_name(pair, configuration.workload),
            {
                "pair": str(pair),
                "workload": configuration.workload,
                **common,
                "search": outcome.search if configuration.workload != SINGLE else [],
                "configurations": [],
            },
        )
        entry["configurations"].append(_configuration(pair, configuration))
    return entries


def failed_entry(pair: Pair, workload: str, command: str, output: list[str], common: dict[str, Any]) -> Entry:
    """Of a peer that could not be installed, or got no model."""
    failure = {"command": command, "output": output}
    return {"pair": str(pair), "workload": workload, **common, "failure": failure}


def has_failed(entry: Entry) -> bool:
    """Whether something is missing."""
    return "failure" in entry or any("failure" in one for one in entry["configurations"] + entry["search"])


def _configuration(pair: Pair, configuration: Configuration) -> dict[str, Any]:
    by_engine: dict[str, list[Run]] = {"steploop": [], pair.peer: []}
    for run in configuration.runs:
        by_engine[run["engine"]].append(run)
    num_rounds = len(by_engine[pair.peer])  # the last one may lack it
    ours, theirs = by_engine["steploop"][:num_rounds], by_engine[pair.peer]
    result: dict[str, Any] = {"slots": configuration.slots, "engines": configuration.engines}
    if num_rounds:
        result["steploop"], result["peer"] = figures(ours), figures(theirs)
        result["ratio"] = _ratio(ours, theirs)
        result["disturbances"] = disturbances(ours + theirs)
    if configuration.failure is not None:
        result["failure"] = configuration.failure
    kept = [{key: value for key, value in run.items() if key not in _NOT_KEPT} for run in configuration.runs]
    return {**result, "runs": kept}


def _rate(run: Run) -> float:
    """Output tokens per second; of one request alone, once its prompt is done."""
    return 1 / run["tpot_p50"] if run["workload"] == SINGLE else run["throughput"]


def _ratio(ours: list[Run], theirs: list[Run]) -> dict[str, Any]:
    pairs = [_rate(a) / _rate(b) for a, b in zip(ours, theirs, strict=True)]
    first_tokens = zip(ours[0]["first_token_ids"], theirs[0]["first_token_ids"], strict=True)
    return {
        "pairs": pairs,
        "median": median(pairs),
        "range": [min(pairs), max(pairs)],
        "rates": {"steploop": spread([_rate(run) for run in ours]), "peer": spread([_rate(run) for run in theirs])},
        # That both run the same model on the same prompts; arithmetic that rounds differently breaks some near ties.
        "first_tokens_equal": sum(a == b for a, b in first_tokens),
    }


def format_report(entries: dict[str, Entry]) -> str:
    """All entries, by workload."""
    lines: list[str] = []
    described = dict.fromkeys(_describe(entry) for entry in entries.values())
    for description in described:
        lines += ["", description] if len(described) > 1 else [description]
        own = [entry for entry in entries.values() if _describe(entry) == description]
        for workload in dict.fromkeys(entry["workload"] for entry in own):
            lines += ["", _title(workload)]
            for entry in own:
                if entry["workload"] == workload:
                    lines += _entry_lines(entry)
    measured = [one for entry in entries.values() for one in entry.get("configurations", []) if "ratio" in one]
    if measured:
        found = [f"{entry['pair']}: {line}" for entry in entries.values() for line in _disturbances(entry)]
        lines += ["", *_versions(entries), "", *quietness(found)]
    return "\n".join(lines)


def _describe(entry: Entry) -> str:
    machine, settings = entry["machine"], entry["settings"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {settings['model']}, "
        f"{settings['num_threads']} threads, first {settings['num_requests']} requests, outputs of at most "
        f"{settings['max_output']} tokens"
    )


def _title(workload: str) -> str:
    what = "decoded tokens/s of one request alone" if workload == SINGLE else "output tokens/s, all requests at once"
    return f"{workload}: {what}; median [min-max]; times to first token p50 / p99, time per output token p50"


def _entry_lines(entry: Entry) -> list[str]:
    if "failure" in entry:
        failure = entry["failure"]
        return [f"  {entry['pair']}: NOT INSTALLED; this failed: {failure['command']}", *_indented(failure["output"])]
    lines = []
    for found in entry["search"]:
        if "failure" in found:
            lines += [f"  {entry['pair']}, {found['slots']} slots: FAILED", *_indented(found["failure"])]
    measured = [one for one in entry["configurations"] if "ratio" in one]
    best = max(measured, key=lambda one: one["ratio"]["rates"]["peer"][0], default=None)
    for one in entry["configurations"]:
        slots = f", {one['slots']} slots" if one["slots"] else ""
        if "ratio" in one:
            mark = ", the peer's best" if len(measured) > 1 and one is best else ""
            lines += [f"  {entry['pair']}{slots}{mark}: {_ratio_text(one['ratio'])}", *_figure_lines(entry, one)]
        if "failure" in one:
            lines += [f"  {entry['pair']}{slots}: FAILED", *_indented(one["failure"])]
    return lines


def _ratio_text(ratio: dict[str, Any]) -> str:
    low, high = ratio["range"]
    pairs = " ".join(f"{value:.2f}" for value in ratio["pairs"])
    return f"{ratio['median']:.2f}x [{low:.2f}-{high:.2f}], pair by pair {pairs}"


def _figure_lines(entry: Entry, one: dict[str, Any]) -> list[str]:
    ratio = one["ratio"]
    lines = []
    for name, key in (("steploop", "steploop"), (entry["pair"].partition("/")[2], "peer")):
        own = one[key]
        lines.append(
            f"      {name:24}{cell(ratio['rates'][key], 1, '.1f'):>24}  first {own['ttft_p50'][0]:.2f} / "
            f"{own['ttft_p99'][0]:.2f} s, each {own['tpot_p50'][0] * 1e3:.1f} ms"
        )
    num_requests = one["peer"]["num_requests"][0]
    lines.append(f"      first tokens that agree: {ratio['first_tokens_equal']} of {num_requests:.0f}")
    return lines


def _versions(entries: dict[str, Entry]) -> list[str]:
    lines = [f"steploop: {STEPLOOP_SLOTS} slots. What each engine is, and what it was told:"]
    for entry in entries.values():
        dtype = entry["pair"].partition("/")[0]
        for one in entry.get("configurations", []):
            for name, about in one["engines"].items():
                versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
                told = ", ".join(f"{key} {about[key]}" for key in ("dtype", "num_threads"))
                lines.append(f"  {f'steploop {dtype}' if name == 'steploop' else name}: {versions}; {told}")
    return list(dict.fromkeys(lines))


def _disturbances(entry: Entry) -> list[str]:
    return [line for one in entry.get("configurations", []) for line in one.get("disturbances", [])]


def _indented(lines: list[str]) -> list[str]:
    return [f"      {line}" for line in lines[-MAX_FAILURE_LINES:]]
