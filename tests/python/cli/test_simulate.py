"""`steploop simulate` as a person or a script runs it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from steploop.cli import main
from steploop.simulation.arguments import SIMULATE_EPILOG

Capture = pytest.CaptureFixture[str]

SMALL = ["simulate", "llama-3-8b", "--device", "H100", "--num-requests", "40"]


def report(capsys: Capture, *arguments: str) -> dict[str, Any]:
    """What `simulate ... --json -` says."""
    assert main([*arguments, "--json", "-"]) == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_report(capsys: Capture) -> None:
    assert main([*SMALL, "--arrivals", "poisson:20", "--slo", "ttft=1,itl=0.000001"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for words in (
        "llama-3-8b in bfloat16, 14.96 GiB of weights, 131072 KV bytes a token on each of 1 x H100",
        "factors: weight_bandwidth_efficiency 0.8, compute_efficiency 0.65",
        "prompts: 40, tokens: mean ",
        "arrivals: 20/s over ",
        "40 requests in ",
        "throughput: ",
        "within ttft 1 s (100.0%), itl 1e-06 s (",
        "time to first token (TTFT)",
        "queue time",
        "steps: ",
        "preemptions: 0",
    ):
        assert words in out


def test_json(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    assert "40 requests in " in capsys.readouterr().out
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert set(loaded) == {"steploop_version", "settings", "workload", "sweep", "runs"}
    assert loaded["settings"]["device"] == "H100"
    assert loaded["settings"]["factors"]["step_us"] == 500
    assert loaded["workload"]["arrivals"] == "burst"
    assert loaded["sweep"] is None
    [run] = loaded["runs"]
    assert set(run) == {
        "swept",
        "workload",
        "duration",
        "requests",
        "throughput",
        "goodput",
        "latencies",
        "queue_time",
        "occupancy",
        "kv_cache",
        "preemption",
        "steps",
    }
    assert run["requests"] == {"asked": 40, "completed": 40, "num_truncated": 0}
    assert run["goodput"] is None
    assert report(capsys, *SMALL)["runs"] == [run]  # the same again


def test_slo(capsys: Capture) -> None:
    [run] = report(capsys, *SMALL, "--slo", "ttft=100,e2e=0.3")["runs"]
    goodput = run["goodput"]
    assert goodput["slo"] == {"ttft": 100, "e2e": 0.3}
    assert goodput["share_within"]["ttft"] == 1
    assert 0 < goodput["share_within"]["e2e"] < 1
    assert goodput["num_good"] == goodput["share_of_asked"] * 40 == goodput["share_within"]["e2e"] * 40
    assert goodput["requests_per_second"] == pytest.approx(goodput["num_good"] / run["duration"])


@pytest.mark.parametrize(
    ("sweep", "name", "values"),
    [
        ("rate=5..20", "rate", [5, 10, 20]),
        ("rate=5..15:5", "rate", [5, 10, 15]),
        ("max-num-seqs=1,4", "max_num_seqs", [1, 4]),
        ("scheduling-policy=static,on_demand", "scheduling_policy", ["static", "on_demand"]),
        ("device=L4,h100", "device", ["L4", "h100"]),
        ("dtype=fp8,int4", "dtype", ["fp8", "int4"]),
        ("num-replicas=1..4", "num_replicas", [1, 2, 4]),
    ],
)
def test_sweeps(sweep: str, name: str, values: list[Any], capsys: Capture) -> None:
    arguments = [*SMALL, "--arrivals", "poisson:10", "--sweep", sweep]
    loaded = report(capsys, *arguments)
    assert loaded["sweep"] == {"name": name, "values": values}
    assert [run["swept"] for run in loaded["runs"]] == values
    assert len({run["duration"] for run in loaded["runs"]}) == len(values)  # each made a difference
    assert main([*arguments, "--slo", "ttft=1"]) == 0
    out = capsys.readouterr().out
    assert f"By {name}; milliseconds, p50 / p99" in out
    assert f"{name} = {values[0]}" in out
    assert "goodput/s" in out
    assert "…" not in out


def test_more_devices_are_faster(capsys: Capture) -> None:
    runs = report(capsys, *SMALL, "--sweep", "tensor-parallel-size=1..4")["runs"]
    durations = [run["duration"] for run in runs]
    assert durations == sorted(durations, reverse=True)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
@pytest.mark.parametrize("more", [[], ["--sweep", "max-num-seqs=2,8"], ["--sweep", "queue-order=fcfs,fair"]])
def test_pictures(suffix: str, more: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / f"a{suffix}"
    assert main([*SMALL, "--plot", str(path), *more]) == 0
    assert f"The picture is in {path}." in capsys.readouterr().out.replace("\n", "")
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    elif suffix == ".svg":
        ET.fromstring(content.decode())
    else:
        assert b"<svg" in content


def test_conversations(capsys: Capture) -> None:
    arguments = ["--turns", "fixed:4", "--shared-prefix", "100", "--arrivals", "poisson:2", "--max-tokens", "300"]
    [run] = report(capsys, *SMALL, *arguments)["runs"]
    assert run["kv_cache"]["prefix_hit_rate"] > 0.5
    assert main([*SMALL, *arguments]) == 0
    assert "of prompt tokens found in it" in capsys.readouterr().out
    [without] = report(capsys, *SMALL, *arguments, "--no-prefix-caching")["runs"]
    assert without["kv_cache"]["num_cached_tokens"] == 0


def test_a_small_cache(capsys: Capture) -> None:
    arguments = ["--max-model-len", "1024", "--num-kv-blocks", "64", "--max-num-seqs", "32"]
    [run] = report(capsys, *SMALL, *arguments)["runs"]
    assert run["kv_cache"]["num_blocks"] == 64
    assert run["preemption"]["num_preemptions"] > 0
    [run] = report(capsys, *SMALL, *arguments, "--scheduling-policy", "reserve")["runs"]
    assert run["preemption"]["num_preemptions"] == 0


def test_a_folder(tiny_llama: Path, capsys: Capture) -> None:
    [run] = report(capsys, "simulate", str(tiny_llama), "--num-requests", "5")["runs"]
    assert run["requests"]["completed"] == 5


def test_this_machine(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """Measured first; or once, into a file."""
    loaded = report(capsys, "simulate", str(tiny_llama), "--device", "this-machine", "--num-requests", "20")
    assert loaded["settings"]["device"] == "this-machine"
    assert loaded["settings"]["dtype"] == "float32"
    assert loaded["settings"]["factors"]["weight_bandwidth_efficiency"] == 1
    assert loaded["runs"][0]["throughput"]["output_tokens_per_second"] > 0

    path = str(tmp_path / "here.json")
    assert main(["calibrate", str(tiny_llama), path, "--repeats", "1"]) == 0
    assert "steps of the grid: " in capsys.readouterr().out
    kept = [report(capsys, "simulate", str(tiny_llama), "--device", path, "--num-requests", "20") for _ in range(2)]
    assert kept[0] == kept[1]
    assert main(["simulate", "llama-3-8b", "--device", path, "--num-requests", "2", "--num-kv-blocks", "600"]) == 0
    assert "note: this-machine was measured with " in capsys.readouterr().out
    for arguments, words in (
        (["--dtype", "int8"], "--dtype must be float32, which this-machine was measured with, got int8"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size must be 1 on this-machine"),
    ):
        assert main(["simulate", str(tiny_llama), "--device", path, *arguments]) == 1
        assert words in capsys.readouterr().err
    assert main(["calibrate", str(tiny_llama), str(tmp_path / "none" / "here.json")]) == 1
    assert "FILE must be in a folder that exists" in capsys.readouterr().err
    assert main(["calibrate", str(tiny_llama), path, "--max-model-len", "10"]) == 1
    assert "calibrate needs room for at least 10 of its runs" in capsys.readouterr().err


def test_efficiency(capsys: Capture) -> None:
    loaded = report(capsys, *SMALL, "--efficiency", "step_us=9000,compute_efficiency=0.1")
    assert loaded["settings"]["factors"]["step_us"] == 9000
    assert loaded["settings"]["factors"]["compute_efficiency"] == 0.1
    assert loaded["runs"][0]["steps"]["mean_duration"] > 0.009


def test_a_model_that_does_not_fit(capsys: Capture) -> None:
    assert main(["simulate", "llama-3-70b", "--device", "H100"]) == 1
    err = capsys.readouterr().err
    assert "do not fit H100 at tensor_parallel_size=1: 66479718400 bytes (61.91 GiB) too little" in err
    assert "they would at 2" in err
    assert main(["simulate", "llama-3-70b", "--device", "H100", "--tensor-parallel-size", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "H10"], "did you mean H100?"),
        (["--device", "none.json"], "none.json cannot be read"),
        (["--device", "README.json"], "README.json cannot be read"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size must divide the 32 heads of llama-3-8b, got 3"),
        (["--num-replicas", "0"], "num_replicas must be >= 1, got 0"),
        (["--dtype", "int3"], "dtype must be one of float32, bfloat16"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype must be one of"),
        (["--efficiency", "step_u=1"], "did you mean step_us?"),
        (["--efficiency", "step_us"], "--efficiency must be NAME=NUMBER,..., got 'step_us'"),
        (["--efficiency", "step_us=-1"], "step_us must be a finite number >= 0, got -1"),
        (["--efficiency", "compute_efficiency=nan"], "compute_efficiency must be a finite number > 0, got nan"),
        (["--efficiency", ""], "--efficiency must be NAME=NUMBER"),
        (["--gpu-memory-utilization", "2"], "gpu_memory_utilization must be in (0, 1], got 2"),
        (["--kv-cache-memory-bytes", "1000"], "kv_cache_memory_bytes must hold a sequence of max_model_len=8192"),
        (["--kv-cache-memory-bytes", "1" + "0" * 12], "kv_cache_memory_bytes must be at most"),
        (["--max-model-len", "10000"], "max_model_len must be <= 8192"),
        (["--max-tokens", "1"], "max_tokens must be at least the longest output drawn"),
        (["--prompt-lengths", "fixed:9000"], "request 0: "),
        (["--slo", "speed=1"], "an SLO must be one of ttft=SECONDS"),
        (["--sweep", "rate=1..x"], "a range must have the form LOW..HIGH"),
        (["--sweep", "max-num-seq=1"], "did you mean max_num_seqs?"),
        (["--sweep", "rate=1,2", "--arrivals", "burst"], "burst has no rate"),
        (["--sweep", "rate=1,nan"], "rate"),
        (["--sweep", "no-prefix-caching=true,false"], "a sweep must be one of"),
        (["--sweep", "device=L4,H10"], "did you mean H100?"),
        (["--sweep", "num-kv-blocks=1,2000"], "that can take 27 KV blocks of 16 tokens, and there are 1"),
        (["--plot", "a.pdf"], "--plot must be a .svg, .png, .html file"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json cannot be written"),
    ],
)
def test_refused(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main([*SMALL, *arguments]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_unknown_model(capsys: Capture) -> None:
    assert main(["simulate", "opt-13"]) == 1
    err = capsys.readouterr().err
    assert "MODEL must be one of opt-13b, llama-3-8b, llama-3-70b, gpt3-175b, " in err
    assert "did you mean opt-13b?" in err


def test_help_is_whole(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(SIMULATE_EPILOG.split()) in out
    assert "(default burst)" in out
