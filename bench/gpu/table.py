"""The short table that a check prints last."""

from __future__ import annotations

from typing import Any

from gpu.summary import mode_of, results_of

ROW = "{:<72} {:>9} {:>9} {:>9}  {}"


def table(report: dict[str, Any]) -> str:
    """Stages, kernels, decode steps, workloads and targets, of a report that is summed up."""
    summary = report["summary"]
    lines = [ROW.format("stage", "seconds", "", "", "status")]
    for entry in report["stages"]:
        lines.append(ROW.format(entry["name"], entry["seconds"], "", "", entry["status"] + _reason(entry)))
    lines += ["", ROW.format("kernels, as shares of the copy bandwidth", "worst", "median", "best", "")]
    for group in summary["kernels"]:
        figures = [_percent(group[key]) if group["is_share"] else group[key] for key in ("worst", "median", "best")]
        lines.append(ROW.format(group["name"], *figures, ""))
    lines += [
        "",
        ROW.format("decode steps, as shares of the time that reading the weights takes", "us", "share", "", ""),
    ]
    for step in summary["decode_steps"]:
        name = f"{step['model']}, batch {step['batch']}, {mode_of(step)}"
        lines.append(ROW.format(name, step["median_us"], _percent(step["share_of_bound"]), "", ""))
    for result in results_of(report, "peers"):
        if result["name"] == "decode":
            name = f"{result['model']}, batch {result['batch']}, {mode_of(result)}"
            lines.append(ROW.format(name, result["median_us"], "", "", ""))
    lines += ["", ROW.format("workload", "tokens/s", "", "", "")]
    for result in results_of(report, "engine") + results_of(report, "peers"):
        if result["name"] == "workload":
            name = f"{result['model']}, {result['policy']}, {mode_of(result)}"
            lines.append(ROW.format(name, result["tokens_per_s"], "", "", ""))
    lines += ["", ROW.format("target", "worst", "median", "wanted", "status")]
    lines += [_target(target) for target in summary["targets"]]
    return "\n".join(line.rstrip() for line in lines)


def _target(target: dict[str, Any]) -> str:
    if "at_most" in target:
        return ROW.format(target["name"], target.get("findings", ""), "", target["at_most"], target["status"])
    status = target["status"]
    if target.get("num_met", 0) < target.get("num_measured", 0):
        status += f": {target['num_met']} of {target['num_measured']}, worst {target['worst_at']}"
    shares = [_percent(target.get(key)) for key in ("worst", "median", "at_least")]
    return ROW.format(target["name"], *shares, status)


def _reason(entry: dict[str, Any]) -> str:
    if "reason" in entry:
        return f": {entry['reason']}"
    parts = []
    for command in entry["commands"]:
        if command["status"] != "passed":
            said = command.get("tail") or [""]
            parts.append(f"{command['name']}: {command.get('reason', command['status'])} {said[-1][:120]}".rstrip())
    return f": {'; '.join(parts)}" if parts else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
