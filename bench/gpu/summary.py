"""What a check's results come to: ceilings, kernels by kind, decode steps, and targets that are met or not."""

from __future__ import annotations

from typing import Any

from gpu.shapes import LLAMA_3_8B

MIN_KV_BYTES = 64_000_000
MIN_ROW_TOKENS = 4096
ROW_KERNELS = ("rms_norm", "silu_mul", "rope_kv_write")
GEMM = f"gemm/{LLAMA_3_8B.name}/"


def results_of(report: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """All results of a stage, whatever became of it."""
    return [
        result
        for entry in report["stages"]
        if entry["name"] == stage
        for command in entry["commands"]
        for result in command.get("results", [])
    ]


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Ceilings, kernels, decode steps and targets. An emulated device says nothing about speed."""
    is_emulated = bool(report.get("emulated"))
    copy = None if is_emulated else copy_rate(report)
    matmul = _one(results_of(report, "rates"), "matmul", "tflop_per_s")
    kernels = [] if is_emulated else [result for result in results_of(report, "kernels") if "name" in result]
    steps = [_with_bound(step, report, copy) for step in results_of(report, "engine") if step["name"] == "decode"]
    return {
        "copy_gb_per_s": copy,
        "matmul_tflop_per_s": matmul,
        "kernels": _groups(kernels),
        "decode_steps": steps,
        "targets": _targets(report, kernels, steps, matmul),
    }


def copy_rate(report: dict[str, Any]) -> float | None:
    """Bytes read and written in a copy within the device, in GB/s: as torch measured it, else as the benchmarks did."""
    rate = _one(results_of(report, "rates"), "copy", "gb_per_s")
    return rate or next((r["copy_gb_per_s"] for r in results_of(report, "kernels") if "copy_gb_per_s" in r), None)


def _groups(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a kind together: where they are bound by memory as shares of the copy bandwidth."""
    largest = max((result["tokens"] for result in kernels if "tokens" in result), default=0)
    by_share: dict[str, dict[str, float]] = {
        "attention, decode, 64 MB of KV or more": _large_decodes(kernels),
        "gemm, 8B layers, 128 rows or less": _figures(kernels, GEMM, "share_of_copy"),
    }
    for name in dict.fromkeys(r["name"].partition("/")[0] for r in kernels if r.get("tokens") == largest):
        by_share[f"{name}, {largest} tokens"] = _figures(kernels, f"{name}/tokens{largest}", "share_of_copy")
    by_rate = {
        "attention, prompt, TFLOP/s": _figures(kernels, "attention/prompt/", "tflop_per_s"),
        "gemm, 8B layers, 512 rows or more, TFLOP/s": {
            r["name"]: r["tflop_per_s"] for r in kernels if r["name"].startswith(GEMM) and r["rows"] >= 512
        },
    }
    groups = [{"name": name, "is_share": True} | spread(figures) for name, figures in by_share.items() if figures]
    return groups + [
        {"name": name, "is_share": False} | spread(figures) for name, figures in by_rate.items() if figures
    ]


def _large_decodes(kernels: list[dict[str, Any]]) -> dict[str, float]:
    large = [result for result in kernels if result.get("kv_bytes", 0) >= MIN_KV_BYTES]
    return _figures(large, "attention/decode/", "share_of_copy")


def _figures(kernels: list[dict[str, Any]], prefix: str | tuple[str, ...], key: str) -> dict[str, float]:
    return {r["name"]: r[key] for r in kernels if r["name"].startswith(prefix) and key in r}


def spread(figures: dict[str, float]) -> dict[str, Any]:
    """The smallest, the middle one and the largest, and which is the smallest."""
    ordered = sorted(figures, key=lambda name: figures[name])
    chosen = {"worst": ordered[0], "median": ordered[len(ordered) // 2], "best": ordered[-1]}
    return {label: round(figures[name], 4) for label, name in chosen.items()} | {
        "worst_at": ordered[0],
        "num_measured": len(ordered),
    }


def _targets(
    report: dict[str, Any], kernels: list[dict[str, Any]], steps: list[dict[str, Any]], matmul: float | None
) -> list[dict[str, Any]]:
    decodes = _large_decodes(kernels)
    rows = _figures([r for r in kernels if r.get("tokens", 0) >= MIN_ROW_TOKENS], ROW_KERNELS, "share_of_copy")
    prompts = {}
    if matmul:
        prompts = {name: rate / matmul for name, rate in _figures(kernels, "attention/prompt/", "tflop_per_s").items()}
    first_steps = {
        f"{step['model']}, batch 1, {mode_of(step)}": step["share_of_bound"]
        for step in steps
        if step["model"] == LLAMA_3_8B.name and step["batch"] == 1 and step["share_of_bound"]
    }
    return [
        _target("decode attention, 64 MB of KV or more: share of copy bandwidth", 0.85, decodes),
        _target("norm, activation, KV write, 4k tokens or more: share of copy bandwidth", 0.85, rows),
        _target("prompt attention: share of the matmul rate", 0.35, prompts),
        _target("8B decode step, batch 1: share of its weight-bandwidth bound", 0.75, first_steps),
        _sanitizer_target(report),
    ]


def _target(name: str, at_least: float, shares: dict[str, float]) -> dict[str, Any]:
    """Met where the worst meets it."""
    target: dict[str, Any] = {"name": name, "at_least": at_least, "status": "not measured"}
    if shares:
        target |= spread(shares)
        target["num_met"] = sum(share >= at_least for share in shares.values())
        target["status"] = "met" if target["num_met"] == len(shares) else "not met"
    return target


def _sanitizer_target(report: dict[str, Any]) -> dict[str, Any]:
    """Met only where every program ran to its end."""
    runs = [command for entry in report["stages"] if entry["name"] == "sanitizer" for command in entry["commands"]]
    results = results_of(report, "sanitizer")
    findings = sum(result["findings"] for result in results)
    target: dict[str, Any] = {"name": "sanitizer findings", "at_most": 0, "status": "not measured"}
    if findings or (runs and len(results) == len(runs)):
        target |= {"status": "not met" if findings else "met", "findings": findings, "num_measured": len(results)}
    return target


def _with_bound(step: dict[str, Any], report: dict[str, Any], copy: float | None) -> dict[str, Any]:
    """Beside a step's time the time in which its weights could be read, at the speed of a copy."""
    commands = [
        command["results"]
        for entry in report["stages"]
        if entry["name"] == "engine"
        for command in entry["commands"]
        if step in command.get("results", [])
    ]
    loads = [result for results in commands for result in results if result["name"] == "load"]
    kept = {key: step[key] for key in ("model", "batch", "batch_invariant", "median_us")}
    if not copy or not loads:
        return kept | {"bound_us": None, "share_of_bound": None}
    bound_us = loads[0]["read_weight_bytes"] / (copy * 1e9) * 1e6
    return kept | {"bound_us": round(bound_us, 1), "share_of_bound": round(bound_us / step["median_us"], 4)}


def _one(results: list[dict[str, Any]], name: str, key: str) -> float | None:
    return next((result[key] for result in results if result["name"] == name), None)


def mode_of(result: dict[str, Any]) -> str:
    """Who ran it, and how."""
    if result.get("engine", "steploop") != "steploop":
        return str(result["engine"])
    return "batch invariant" if result["batch_invariant"] else "torch's products"
