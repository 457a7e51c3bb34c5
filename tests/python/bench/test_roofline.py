"""bench/engine/roofline.py: its sums on made-up figures, and from end to end with stand-ins for the C++ programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SPEC = SimpleNamespace(
    vocab_size=1000, hidden_size=10, intermediate_size=30, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=5
)
WEIGHTS = {
    "qkv": {"format": "int8", "size_bytes": 900},
    "o": {"format": "int8", "size_bytes": 500},
    "gate_up": {"format": "int8", "size_bytes": 1300},
    "down": {"format": "int8", "size_bytes": 700},
    "lm_head": {"format": "bfloat16", "size_bytes": 20000},
}
PROBES: list[dict[str, Any]] = [
    {"name": "peak/vdpbf16ps_zmm/threads1", "GFLOP/s": 200.0},
    {"name": "peak/vpdpbusd_zmm/threads1", "GOP/s": 400.0},
    {"name": "read/memory/512_bits/threads1", "GB/s": 18.0},
    {"name": "read/memory/512_bits_prefetched/threads1", "GB/s": 20.0},
    {"name": "read/l2/512_bits/threads1", "GB/s": 100.0},
    {"name": "peak/vdpbf16ps_zmm/threads1", "GFLOP/s": 190.0},
    {"name": "read/memory/512_bits/threads1", "GB/s": 99.0},
    {"name": "read/memory/512_bits/threads1", "GB/s": 17.0},
    {"name": "peak/vdpbf16ps_zmm/threads1", "GFLOP/s": 900.0},
    {"name": "peak/vdpbf16ps_zmm/threads2", "GFLOP/s": 390.0},
    {"name": "read/memory/512_bits/threads2", "GB/s": 30.0},
]


def test_the_median_of_a_probe_and_the_best_way_to_read_count(bench_engine: Path) -> None:
    from roofline_model import Peaks

    peaks = Peaks("avx512", PROBES)
    assert peaks.rates == {
        "vdpbf16ps_zmm": {1: 200.0, 2: 390.0},
        "vpdpbusd_zmm": {1: 400.0},
        "read_memory": {1: 20.0, 2: 30.0},
        "read_l2": {1: 100.0},
    }
    assert (peaks.memory(1), peaks.memory(2), peaks.memory(3)) == (20.0, 30.0, None)
    assert (peaks.arithmetic("bfloat16", 1), peaks.arithmetic("int4", 1)) == (200.0, 400.0)
    assert peaks.arithmetic("float32", 1) is None  # not probed
    assert Peaks("another", PROBES).arithmetic("bfloat16", 1) is None


def test_shares_of_the_peaks(bench_engine: Path) -> None:
    from roofline_model import Peaks, Work

    peaks = Peaks("avx512", PROBES)
    # 0.5 s of memory; 0.2 s of bfloat16 and 0.1 s of integers.
    work = Work(10e9, {"bfloat16": 40e9, "int8": 40e9})
    assert work.shares(1.0, 1, peaks) == {
        "gb_per_s": pytest.approx(10),
        "memory_share": pytest.approx(0.5),
        "gop_per_s": pytest.approx(80),
        "arithmetic_share": pytest.approx(0.3),
        "limit": "memory",
    }
    assert Work(1e9, {"bfloat16": 40e9}).shares(1.0, 1, peaks)["limit"] == "arithmetic"
    unknown = work.shares(1.0, 2, peaks)  # integers were not probed on two threads
    assert (unknown["arithmetic_share"], unknown["limit"]) == (None, "memory")


def test_the_work_of_a_step(bench_engine: Path) -> None:
    from roofline_model import step_work

    work = step_work(SPEC, WEIGHTS, 80, "bfloat16", batch=3, context=50)
    # Weights; keys and values of 3 x 50 tokens and the 3 new ones; 3 rows of logits.
    assert work.num_bytes == 23400 + 3 * 51 * 80 + 3 * 1000 * 4
    # Per layer: q, k, v 10 x 40; o 20 x 10; gate and up 10 x 60; down 30 x 10.
    in_layers = 2 * (400 + 200 + 600 + 300)
    attention = 2 * 2 * 2 * 20 * 50  # 2 layers, 2 products with 20 columns of 50 tokens
    assert work.operations == {"int8": 3 * 2 * in_layers, "bfloat16": 3 * (2 * 10000 + attention)}


def test_kernels_beside_the_peaks(bench_engine: Path) -> None:
    from roofline_model import Peaks, kernel_rows

    lines = [
        {"name": "linear/int8/qkv_576x960/m32/threads1", "median_us": 10.0, "GFLOP/s": 100.0, "GB/s": 2.0},
        {"name": "attention/decode/int8/heads9:3x64/context512/threads1", "median_us": 5.0, "GB/s": 15.0},
        {"name": "attention/prompt/bfloat16/heads9:3x64/tokens512/threads2", "median_us": 7.0, "GFLOP/s": 195.0},
    ]
    linear, decode, prompt = kernel_rows(lines, Peaks("avx512", PROBES))
    assert (linear["kernel"], linear["num_threads"]) == ("linear/int8/qkv_576x960/m32", 1)
    assert linear["seconds"] == pytest.approx(10e-6)
    assert (linear["memory_share"], linear["arithmetic_share"]) == (pytest.approx(0.1), pytest.approx(0.25))
    assert (decode["memory_share"], decode["limit"]) == (pytest.approx(0.75), "memory")
    assert (prompt["arithmetic_share"], prompt["limit"]) == (pytest.approx(0.5), "arithmetic")


def test_a_line_through_points(bench_engine: Path) -> None:
    from roofline_model import fit_line

    exact = fit_line([(0, 1), (2, 2), (4, 3)])
    assert (exact.at_zero, exact.slope, exact.r_squared, exact.largest_deviation) == (1, 0.5, 1, 0)
    bent = fit_line([(0, 1), (1, 1), (2, 4)])  # 0.5 + 1.5 x; 1 is half as much as there should be at x = 1
    assert (bent.at_zero, bent.slope) == (pytest.approx(0.5), pytest.approx(1.5))
    assert bent.largest_deviation == pytest.approx(1.0)
    assert bent.r_squared == pytest.approx(1 - 1.5 / 6)


PROFILE = {
    "num_runs": 2,
    "run_us": 1000.0,
    "operations": {
        "linear_qkv": {"num_calls": 60, "num_barriers": 60, "working_us": [500.0, 540.0], "waiting_us": [100.0, 60.0]},
        "attention": {"num_calls": 60, "num_barriers": 120, "working_us": [100.0, 140.0], "waiting_us": [40.0, 0.0]},
        "sample": {"num_calls": 2, "num_barriers": 0, "working_us": [100.0, 100.0], "waiting_us": [0.0, 0.0]},
        "transfer_blocks": {"num_calls": 0, "num_barriers": 0, "working_us": [0.0, 0.0], "waiting_us": [0.0, 0.0]},
    },
}
PHASES = {"schedule_us": 20.0, "build_us": 40.0, "update_us": 60.0, "forward_us": 900.0, "sample_us": 120.0}


def test_a_profile_adds_up_to_the_step(bench_engine: Path) -> None:
    from roofline_report import outside_us
    from roofline_steps import summarise_profile

    profile = summarise_profile(PROFILE, PHASES, latency_us=1150.0, wall_us=1350.0)
    assert profile == {
        "step_us": 675.0,
        "operations": {
            "linear_qkv": {"num_calls": 30, "num_barriers": 30, "working_us": 260.0, "waiting_us": 40.0},
            "attention": {"num_calls": 30, "num_barriers": 60, "working_us": 60.0, "waiting_us": 10.0},
            "sample": {"num_calls": 1, "num_barriers": 0, "working_us": 50.0, "waiting_us": 0.0},
        },
        "fork_join_us": 500.0 - 420.0,
        "schedule_us": 10.0,
        "build_us": 20.0,
        "update_us": 30.0,
        "python_us": 100.0,
        "other_us": 15.0,
    }
    parts = sum(value for key, value in profile.items() if key.endswith("_us") and key != "step_us")
    assert parts + 260 + 40 + 60 + 10 + 50 == profile["step_us"]
    assert outside_us(profile) == 675.0 - 260 - 60
    assert outside_us(profile, count_own_waits=False) == 675.0 - 260 - 60 - 50


def test_the_medians_of_the_runs_count(bench_engine: Path) -> None:
    from roofline import summarise_format
    from roofline_model import Peaks

    from steploop.weights import ModelSpec

    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_theta=1e4,
    )

    def run(num_threads: int, *seconds: float) -> dict[str, Any]:
        return {"num_threads": num_threads, "batch": 32, "context": 50.0, "seconds": list(seconds)}

    runs = [run(2, 1, 1, 9), run(1, 2, 2, 2), run(2, 2, 2, 2), run(1, 3, 3, 3), run(2, 4, 4, 4), run(1, 4, 4, 4)]
    measured = {"num_threads": 2, "linear_weights": WEIGHTS, "kv_format": "bfloat16", "runs": runs}
    summary = summarise_format(measured, spec, Peaks("avx512", PROBES))
    assert [(row["num_threads"], row["seconds"]) for row in summary["steps"]] == [(1, 3), (2, 2)]
    assert summary["steps"][0]["num_bytes"] == 23400 + 32 * 51 * (2 * 2 * 64 * 2) + 32 * 4000
    assert summary["scaling"] == {32: {"pairs": [2, 1.5, 1], "ratio": 1.5}}
    assert "runs" not in summary


def test_the_report_shows_shares_and_who_disturbed(bench_engine: Path) -> None:
    from roofline_report import format_report
    from roofline_steps import summarise_profile

    rates = {"gb_per_s": 15.0, "memory_share": 0.75, "gop_per_s": 30.0, "arithmetic_share": 0.15, "limit": "memory"}
    step = {"batch": 8, "num_threads": 2, "context": 144.0, "seconds": 5e-3, **rates}
    profile = summarise_profile(PROFILE, PHASES, latency_us=1150.0, wall_us=1350.0) | {"batch": 8}
    contexts = {
        "decode": [(128, 5e-3), (8192, 9e-3)],
        "decode_fit": {"at_zero": 4.9e-3, "slope": 5e-7, "r_squared": 0.9991, "largest_deviation": 0.021},
        "prompt": [],
    }
    result = {
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 8},
        "settings": {"model": "a model"},
        "isa": "avx512",
        "peaks": {
            "kernels": {"vdpbf16ps_zmm": {1: 200.0}, "read_memory": {1: 20.0, 2: 30.0}},
            "int8": {"read_memory": {1: 21.0, 2: 31.0}},
        },
        "kernels": [{"kernel": "linear/x/m1", "num_threads": 1, "seconds": 1e-5, **rates, "arithmetic_share": None}],
        "engines": {
            "int8": {
                "num_threads": 2,
                "steps": [step],
                "scaling": {8: {"pairs": [1.8, 2.0], "ratio": 1.9}},
                "profiles": [profile],
                "contexts": contexts,
            }
        },
        "cores_of_others": {"kernels": {"others": 0.0, "stolen": 0.3}, "int8": {"others": 0.0, "stolen": 0.0}},
    }
    lines = format_report(result).splitlines()

    def line(start: str) -> list[str]:
        return next(line for line in lines if line.startswith(start)).split()

    assert line("read_memory") == ["read_memory", "GB/s", "20.0", "30.0", "21.0", "31.0"]
    assert line("vdpbf16ps_zmm") == ["vdpbf16ps_zmm", "Gop/s", "200.0", "-", "-", "-"]
    assert line("linear/x/m1")[1:] == ["10.0", "15.0", "75%*", "30.0", "-"]
    assert line("int8, batch 8, context 144")[5:] == ["5000.0", "15.0", "75%*", "30.0", "15%"]
    assert "int8, batch 8: 2 threads are 1.90x as fast as one (in turns: 1.80, 2.00)" in lines
    assert line("  waiting at 90 barriers")[-2:] == ["50.0", "7.4%"]
    assert line("no work on linear or attention")[-2:] == ["355.0", "52.6%"]
    assert "    4.90 ms + 0.500 ms per 1000 tokens, R² 0.9991, at most 2.1% off the line" in lines
    assert lines[-2:] == [
        "The machine was NOT quiet; take these figures with care:",
        "  kernels: stolen used 0.30 cores",
    ]


STAND_INS = {
    "bench_peaks": [*PROBES, {"name": "peak/multiply_add_float32/threads2", "GFLOP/s": 100.0}],
    "bench_linear": [
        {"isa": "portable"},
        {"name": "linear/float32/o_576x576/m1/threads1", "median_us": 50.0, "GFLOP/s": 13.0, "GB/s": 26.0},
    ],
    "bench_attention": [{"isa": "portable"}],
}


def test_measures_an_engine(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    for name, lines in STAND_INS.items():
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / name).write_text(f"#!/bin/sh\n[ \"$1\" = --json ] || exit 9\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)
    output = tmp_path / "results" / "roofline.json"
    small = ["--formats", "float32", "--threads", "2", "--batches", "1", "3", "--prompt-tokens", "20", "--steps", "4"]
    small += ["--contexts", "64", "400", "9999", "--rounds", "2", "--wait-quiet", "0", "--model", str(tiny_llama)]
    done = subprocess.run(
        [sys.executable, bench_engine / "roofline.py", *small, "--programs", tmp_path, "--output", output],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert str(tiny_llama) not in output.read_text()  # a name, not where it lies
    assert [row["kernel"] for row in result["kernels"]] == ["linear/float32/o_576x576/m1"]
    assert result["kernels"][0]["memory_share"] == pytest.approx(26 / 20)
    assert result["peaks"]["kernels"] == result["peaks"]["float32"]
    engine = result["engines"]["float32"]
    assert {weights["format"] for weights in engine["linear_weights"].values()} == {"float32"}
    assert engine["linear_weights"]["lm_head"]["size_bytes"] >= 300 * 64 * 4
    assert [(row["batch"], row["num_threads"]) for row in engine["steps"]] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    for row in engine["steps"]:
        # The first token comes with the prompt; then steps that warm up; then four that are measured, 1.5 on the way.
        assert row["context"] == 20 + 4 + 1.5
        assert row["num_bytes"] > sum(weights["size_bytes"] for weights in engine["linear_weights"].values())
        assert row["gb_per_s"] == pytest.approx(row["num_bytes"] * 1e-9 / row["seconds"])
    assert {batch: len(scaling["pairs"]) for batch, scaling in engine["scaling"].items()} == {"1": 2, "3": 2}
    for profile in engine["profiles"]:
        assert profile["operations"]["linear_qkv"]["num_calls"] == 2
        assert profile["operations"]["linear_lm_head"]["num_barriers"] == 1
        parts = sum(value for key, value in profile.items() if key.endswith("_us") and key != "step_us")
        parts += sum(times["working_us"] + times["waiting_us"] for times in profile["operations"].values())
        assert parts == pytest.approx(profile["step_us"])
    # 512 positions leave room for prompts of 502; a chunk has 512, so that no prompt has a whole one.
    assert [tokens for tokens, _ in engine["contexts"]["decode"]] == [69.5, 405.5, 507.5]
    assert engine["contexts"]["decode_fit"]["slope"] != 0
    assert engine["contexts"]["prompt"] == []
    assert "no work on linear or attention" in done.stdout and "2 threads are" in done.stdout


def test_says_that_steps_do_not_fit(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    from roofline_steps import Steps

    steps = Steps(str(tiny_llama), "float32", 1, batch=2, num_prompt_tokens=20, context=200)
    assert steps.decode(2, 20, 30)["context"] == 20 + 4 + 14.5
    with pytest.raises(RuntimeError, match="2 of 2 sequences ended too early: ask for fewer steps"):
        steps.decode(2, 20, 64)
    assert steps.decode(1, 20, 30)["batch"] == 1  # nothing was left behind
    steps.close()


def test_says_which_program_failed(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, bench_engine / "roofline.py", "--model", tiny_llama, "--programs", tmp_path]

    def run() -> tuple[int, str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    assert run() == (1, "bench_linear is not built: `make micro-benchmarks` does it\n")
    (tmp_path / "bench_linear").write_text("#!/bin/sh\necho no such instruction >&2\nexit 3\n")
    (tmp_path / "bench_linear").chmod(0o755)
    assert run() == (1, "bench_linear failed with 3: no such instruction\n")
