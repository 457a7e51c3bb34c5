"""bench/gpu_check.py: from end to end on the emulated device, with programs that fail or hang, and how it sums up."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
PROGRAMS = ("bench_cuda_attention", "bench_cuda_gemm", "bench_cuda_rows")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bench/ on the import path, and nothing of it left behind."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("gpu", "gpu_check", "workload", "machine"):
            del sys.modules[name]


@pytest.fixture
def emulation() -> Path:
    """The folder with the emulated backend and the benchmarks built for it."""
    folder = os.environ.get("STEPLOOP_EMULATED_DIR")
    places = [Path(folder)] if folder else (ROOT / "build" / "checked").glob("**/tests/cuda_emulation")
    for place in places:
        if (place / "libsteploop_cuda_emulated.so").exists():
            return place
    assert not folder and "STEPLOOP_TEST_WHEELS" not in os.environ, "no emulated backend in the build tree of make test"
    pytest.skip("no build tree beside these tests")


def gpu_check(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(BENCH / "gpu_check.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OUT": str(out)},
    )


def report_in(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    return report


def fake_programs(folder: Path, **scripts: str) -> Path:
    """Shell scripts in the place of benchmarks; each leaves its process id beside itself."""
    folder.mkdir()
    for program in PROGRAMS:
        script = scripts.get(program, 'echo \'{"name": "fine"}\'')
        (folder / program).write_text(f"#!/bin/sh\necho $$ > {folder / program}.pid\n{script}\n")
        (folder / program).chmod(0o755)
    return folder


def is_running(program: Path) -> bool:
    pid = int(program.with_name(f"{program.name}.pid").read_text())
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_emulated_from_end_to_end(emulation: Path, tmp_path: Path) -> None:
    process = gpu_check(tmp_path / "out", "--emulate", str(emulation))
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    report = report_in(tmp_path / "out")
    stages = {stage["name"]: stage for stage in report["stages"]}
    skipped = {name for name, stage in stages.items() if stage["status"] == "skipped"}
    assert skipped == {"build", "sanitizer", "rates", "peers"}
    assert all(stages[name]["status"] == "passed" for name in set(stages) - skipped)
    assert all("emulated" in stages[name]["reason"] for name in skipped)

    assert stages["environment"]["commands"][0]["results"][0]["cores"] >= 1
    kernels = [command["results"] for command in stages["kernels"]["commands"]]
    assert len(kernels) == len(PROGRAMS)
    for results in kernels:
        assert results[0]["device"] and len(results) > 5
        assert all(result["median_us"] > 0 for result in results[1:])
    engine = stages["engine"]["commands"][0]["results"]
    runs = [result["name"] for result in engine]
    assert (runs.count("load"), runs.count("decode"), runs.count("workload")) == (1, 4, 4)
    assert {result["batch_invariant"] for result in engine[1:]} == {True, False}

    targets = report["summary"]["targets"]
    assert len(targets) == 5 and {target["status"] for target in targets} == {"not measured"}
    lines = printed.splitlines()
    assert any(line.startswith("decode attention") and line.endswith("not measured") for line in lines[-5:])
    assert str(ROOT) not in (tmp_path / "out" / "gpu_check.json").read_text()


def test_a_program_that_fails_and_one_that_hangs(tmp_path: Path) -> None:
    programs = fake_programs(
        tmp_path / "programs",
        bench_cuda_attention='echo \'{"name": "first"}\'; echo broken >&2; exit 3',
        bench_cuda_gemm='echo \'{"name": "second"}\'; printf \'{"name": "cut\'; sleep 60; true',
    )
    started = time.monotonic()
    process = gpu_check(
        tmp_path / "out", "--emulate", str(programs), "--stages", "kernels", "peers", "--limits", "kernels=2"
    )
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - started < 30
    kernels, peers = report_in(tmp_path / "out")["stages"]
    failed, hung, late = kernels["commands"]
    assert failed["status"] == "failed" and failed["exit_code"] == 3 and failed["tail"] == ["broken"]
    assert failed["results"] == [{"name": "first"}]
    assert hung["status"] == "timed out" and "its limit of 2 s" in hung["reason"]
    assert hung["results"] == [{"name": "second"}]
    assert late == {"name": "bench_cuda_rows", "status": "timed out", "reason": "no time was left"}
    assert kernels["status"] == "timed out" and peers["status"] == "skipped"
    assert not is_running(programs / "bench_cuda_gemm")
    assert (
        "bench_cuda_attention: exit code 3 broken" in printed
        and "broken" in (tmp_path / "out/gpu_check.log").read_text()
    )


def test_later_stages_keep_their_share_of_the_time(tmp_path: Path) -> None:
    programs = fake_programs(tmp_path / "programs", bench_cuda_attention="sleep 60; true")
    process = gpu_check(
        tmp_path / "out", "--emulate", str(programs), "--stages", "kernels", "engine", "--total", "43"
    )  # of which the engine's stage keeps 40 seconds
    process.communicate(timeout=90)
    kernels, engine = report_in(tmp_path / "out")["stages"]
    assert kernels["commands"][0]["limit_s"] <= 3
    assert engine["commands"][0]["limit_s"] > 30


def test_what_was_measured_survives_the_check(tmp_path: Path) -> None:
    programs = fake_programs(tmp_path / "programs", bench_cuda_gemm="sleep 60; true")
    process = gpu_check(tmp_path / "out", "--emulate", str(programs), "--stages", "kernels")
    deadline = time.monotonic() + 30
    while not (programs / "bench_cuda_gemm.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    (kernels,) = report_in(tmp_path / "out")["stages"]
    assert kernels["commands"][0]["results"] == [{"name": "fine"}]
    assert not is_running(programs / "bench_cuda_gemm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "kernel"], "no stage is called 'kernel'; there are environment, build, tests"),
        (["--limits", "kernel=3"], "no stage is called 'kernel'; there are environment, build, tests"),
        (["--limits", "kernels"], "expected STAGE=SECONDS, got 'kernels'"),
        (["--emulate", "nowhere"], "nowhere is no folder"),
    ],
)
def test_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    process = gpu_check(tmp_path, *arguments)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and message in printed


def test_nothing_runs_on_a_machine_without_a_device(tmp_path: Path, bench: None) -> None:
    from gpu.stages import Command, Runner, Stage

    fails = Command("fails", [sys.executable, "-c", "raise SystemExit('there is no device')"], 30)
    report: dict[str, Any] = {}
    Runner(report, lambda _: {}, tmp_path, ROOT, 60).run(
        [
            Stage("environment", 30, 0, lambda: [fails], is_required=True),
            Stage("build", 30, 0, lambda: [Command("never", ["false"], 30)]),
        ]
    )
    assert [(stage["name"], stage["status"]) for stage in report["stages"]] == [
        ("environment", "failed"),
        ("build", "skipped"),
    ]
    assert report["stages"][0]["commands"][0]["tail"] == ["there is no device"]


def test_a_program_that_is_not_there(tmp_path: Path, bench: None) -> None:
    from gpu.stages import Command, Runner, Stage

    report: dict[str, Any] = {}
    missing = Command("missing", [str(tmp_path / "nothing")], 30)
    Runner(report, lambda _: {}, tmp_path, ROOT, 60).run([Stage("kernels", 30, 0, lambda: [missing])])
    (command,) = report["stages"][0]["commands"]
    assert command["status"] == "failed" and "No such file" in command["reason"]


def test_build_is_for_the_device_that_is_there(tmp_path: Path, bench: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check as script

    monkeypatch.setattr(script, "missing_packages", lambda: ["gguf", "pybind11", "rich"])
    monkeypatch.setattr(script, "device_architecture", lambda: "90")
    args = argparse.Namespace(wheels=tmp_path, emulate=None, all_architectures=False)
    (tmp_path / "gguf-0.17.1-py3-none-any.whl").touch()
    build = script.Check(args).stages()[1]
    with pytest.raises(RuntimeError, match="the build needs pybind11"):
        build.commands()
    (tmp_path / "pybind11-3.0.1-py3-none-any.whl").touch()
    carried, install = build.commands()
    assert carried.arguments[-2:] == ["gguf", "pybind11"] and "--no-index" in carried.arguments
    assert "--config-settings=cmake.define.STEPLOOP_CUDA_ARCHITECTURES=90-real" in install.arguments
    assert "--config-settings=cmake.define.STEPLOOP_CUDA=ON" in install.arguments
    args.all_architectures = True
    install = script.Check(args).stages()[1].commands()[1]
    assert not any("ARCHITECTURES" in argument for argument in install.arguments)


def test_reads_what_tools_print(bench: None) -> None:
    from gpu_check import read_pytest, read_sanitizer

    lines = "..s\nfigures in plenty\n=== 1 failed, 30 passed, 2 skipped, 900 deselected in 12.34s ===\n"
    assert read_pytest(lines) == [{"name": "pytest", "failed": 1, "passed": 30, "skipped": 2, "deselected": 900}]
    assert read_pytest("cut off before the end") == []
    assert read_sanitizer("========= ERROR SUMMARY: 3 errors\n") == [{"name": "memcheck", "findings": 3}]
    races = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert read_sanitizer(races) == [{"name": "racecheck", "findings": 0}]
    assert read_sanitizer("killed") == []


def measured(**changes: Any) -> dict[str, Any]:
    """A report of a check in which every target is met."""
    kernels = [
        {"name": "attention/decode/a", "share_of_copy": 0.9, "kv_bytes": 64e6},
        {"name": "attention/decode/small", "share_of_copy": 0.2, "kv_bytes": 63e6},
        {"name": "attention/prompt/a", "share_of_copy": 0.1, "kv_bytes": 1e6, "tflop_per_s": 300.0},
        {"name": "rms_norm/tokens4096", "share_of_copy": 0.9, "tokens": 4096},
        {"name": "silu_mul/tokens1", "share_of_copy": 0.01, "tokens": 1},
        *changes.get("kernels", []),
    ]
    engine = [
        {"name": "load", "weight_bytes": 17e9, "read_weight_bytes": 16e9},
        *(
            {
                "name": "decode",
                "engine": "steploop",
                "model": "llama_3_8b",
                "batch": batch,
                "batch_invariant": True,
                "median_us": microseconds,
            }
            for batch, microseconds in ((1, changes.get("step_us", 5000.0)), (32, 9000.0))
        ),
    ]
    rates = [{"name": "copy", "gb_per_s": 4000.0}, {"name": "matmul", "tflop_per_s": 800.0}]
    sanitizer = [[{"name": "memcheck", "findings": 0}], [{"name": "racecheck", "findings": changes.get("findings", 0)}]]
    if changes.get("sanitizer_cut"):
        sanitizer[1] = []
    stages = {"rates": [rates], "kernels": [kernels], "engine": [engine], "sanitizer": sanitizer}
    return {
        "emulated": changes.get("emulated", False),
        "stages": [
            {
                "name": name,
                "status": "passed",
                "seconds": 1.0,
                "commands": [{"name": name, "status": "passed", "results": results} for results in commands],
            }
            for name, commands in stages.items()
            if name not in changes.get("without", ())
        ],
    }


def statuses(report: dict[str, Any]) -> list[str]:
    from gpu.summary import summarise

    return [target["status"] for target in summarise(report)["targets"]]


def test_targets(bench: None) -> None:
    from gpu.summary import summarise
    from gpu.table import table

    report = measured()
    assert statuses(report) == ["met"] * 5
    assert statuses(measured(emulated=True))[:4] == ["not measured"] * 4
    assert statuses({"stages": []}) == ["not measured"] * 5
    # One kernel that falls short is enough.
    slow = [{"name": "attention/decode/b", "share_of_copy": 0.84, "kv_bytes": 1e9}]
    assert statuses(measured(kernels=slow)) == ["not met", *["met"] * 4]
    slow = [{"name": "rope_kv_write/tokens4096", "share_of_copy": 0.84, "tokens": 4096}]
    assert statuses(measured(kernels=slow)) == ["met", "not met", *["met"] * 3]
    slow = [{"name": "attention/prompt/b", "tflop_per_s": 279.0}]
    assert statuses(measured(kernels=slow)) == ["met", "met", "not met", "met", "met"]
    assert statuses(measured(step_us=5400.0)) == [*["met"] * 3, "not met", "met"]
    assert statuses(measured(findings=1)) == [*["met"] * 4, "not met"]
    assert statuses(measured(sanitizer_cut=True)) == [*["met"] * 4, "not measured"]
    assert statuses(measured(without=["rates"])) == ["met", "met", "not measured", "not measured", "met"]

    step = summarise(report)["decode_steps"][0]
    assert step["bound_us"] == 4000.0 and step["share_of_bound"] == 0.8
    report["summary"] = summarise(report)
    lines = table(report).splitlines()
    assert any(line.split() == "llama_3_8b, batch 1, batch invariant 5000.0 80.0%".split() for line in lines)
    assert any(line.split() == "rms_norm, 4096 tokens 90.0% 90.0% 90.0%".split() for line in lines)
    assert [line.split()[-1] for line in lines[-5:]] == ["met"] * 5
    report = measured(kernels=[{"name": "attention/decode/b", "share_of_copy": 0.84, "kv_bytes": 1e9}])
    report["summary"] = summarise(report)
    assert table(report).splitlines()[-5].endswith("not met: 1 of 2, worst attention/decode/b")


def test_shapes_are_of_the_models(bench: None) -> None:
    from gpu.shapes import LLAMA_3_8B, PLANS, SMOLLM2_135M, read_weight_bytes
    from steploop import _C

    sizes = {}
    for plan in (LLAMA_3_8B, SMOLLM2_135M):
        c = _C.ModelConfig(**plan.config)
        layer = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.hidden_size * (
            c.intermediate_size
        )
        tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        sizes[plan.name] = c.num_layers * (layer + 2 * c.hidden_size) + tables + c.hidden_size
    assert sizes == {"llama_3_8b": 8030261248, "smollm2_135m": 134515008}
    assert read_weight_bytes(SMOLLM2_135M.config, 1000) == 1000
    assert read_weight_bytes(LLAMA_3_8B.config, 2 * sizes["llama_3_8b"]) == 2 * (8030261248 - 128256 * 4096)
    assert sum(request.num_output_tokens for request in LLAMA_3_8B.requests()) == 3782
    assert len(PLANS["tiny"].requests()) == 4
