"""bench/engine/offline.py from end to end on a tiny model, and how it sums up what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def offline(bench_engine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(bench_engine / "offline.py"), "--wait-quiet", "0", "--threads", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_runs_all_workloads(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    small = ["--num-requests", "4", "--max-output", "8", "--repeats", "2", "--max-num-seqs", "2"]
    output = tmp_path / "results" / "offline.json"
    done = offline(bench_engine, "--model", str(tiny_llama), *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "mixed: 4 requests" in done.stdout and "uniform: 4 requests, 32 output tokens" in done.stdout
    assert "single: 1 requests, 8 output tokens" in done.stdout

    result = json.loads(output.read_text())
    assert str(tiny_llama) not in output.read_text()
    assert result["settings"]["max_num_seqs"] == 2 and result["engine"]["num_threads"] == 1
    assert len(result["runs"]) == 6
    for run in result["runs"]:
        assert run["throughput"] == pytest.approx(run["num_output_tokens"] / run["duration"])
        assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= run["duration"]
        assert 0 < run["inter_token_latency_p50"] <= run["inter_token_latency_p99"]
        assert 0.5 <= run["mean_occupancy"] <= 1
        assert 0 <= run["kv_tail_waste"] < 0.5
        assert set(run["cores"]) == {"steploop", "others", "stolen"}
    assert result["summary"]["uniform"]["num_output_tokens"] == [32, 32, 32]


def test_static_policy(bench_engine: Path, tiny_llama: Path) -> None:
    small = ["--num-requests", "4", "--max-output", "8", "--repeats", "1", "--workloads", "mixed"]
    done = offline(
        bench_engine, "--model", str(tiny_llama), *small, "--policy", "static", "--dtype", "float32", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["settings"]["policy"] == "static"
    assert result["engine"]["dtype"] == "float32"


def test_a_mute_engine_is_ended(bench_engine: Path, tmp_path: Path) -> None:
    from engines import EngineProcess

    (tmp_path / "mute.py").write_text("import sys, time; print('asleep', file=sys.stderr, flush=True); time.sleep(600)")
    with pytest.raises(RuntimeError, match="the mute process gave no answer in 0.5 s; it wrote:\nasleep"):
        EngineProcess("mute", sys.executable, {}, {}, script=tmp_path / "mute.py", timeout=0.5)


def test_says_what_an_engine_died_of(bench_engine: Path, tmp_path: Path) -> None:
    done = offline(bench_engine, "--model", str(tmp_path))
    assert done.returncode == 1
    assert "the steploop process ended early" in done.stderr and "has no config.json" in done.stderr


def run_of(engine: str, repeat: int, **cores: float) -> dict[str, Any]:
    return {
        "engine": engine,
        "workload": "mixed",
        "repeat": repeat,
        "cores": {"steploop": 0.0, "peer": 0.0, "others": 0.01, "stolen": 0.0} | cores,
    }


def test_notes_who_disturbed_a_run(bench_engine: Path) -> None:
    from report import disturbances

    quiet = run_of("steploop", 0, steploop=1.9)
    assert disturbances([quiet]) == []
    assert disturbances([quiet, run_of("steploop", 1, steploop=1.9, peer=0.5, others=0.02)]) == [
        "mixed, steploop, run 2: peer used 0.50 cores"
    ]
    assert disturbances([run_of("peer", 0, peer=1.9, others=1.2)]) == ["mixed, peer, run 1: others used 1.20 cores"]


def test_processor_time_is_told_apart(bench_engine: Path) -> None:
    from machine import CpuUse

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        use = CpuUse({"busy": busy.pid, "idle": 0})
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(0.5)
        cores = use.cores()
    finally:
        busy.kill()
        busy.wait()
    assert cores["busy"] > 0.05 and set(cores) == {"busy", "idle", "others", "stolen"}


def test_export_gives_a_folder_of_the_same_model(bench_engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    import torch
    from export_hf import export
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from steploop.weights import open_checkpoint

    original = open_checkpoint(tiny_llama)
    export(original, tmp_path, "float32")
    copy = open_checkpoint(tmp_path)
    assert copy.spec == original.spec and copy.generation.eos_token_ids == original.generation.eos_token_ids
    weights = load_file(tmp_path / "model.safetensors")
    assert weights and all(torch.equal(weights[name], tensor) for name, tensor in original.tensors(torch.float32))
    prompt = torch.tensor([[5, 6, 7, 8]])
    logits = [AutoModelForCausalLM.from_pretrained(folder)(prompt).logits for folder in (tiny_llama, tmp_path)]
    assert torch.equal(*logits)
