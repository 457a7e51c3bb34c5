"""`steploop plan` as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steploop.cli import main
from steploop.simulation import DEVICES, MODELS
from steploop.simulation.arguments import PLAN_EPILOG
from steploop.simulation.calibration import Calibration

Capture = pytest.CaptureFixture[str]

SMALL = ["plan", "llama-3-8b", "--device", "H100", "--num-requests", "400", "--rate", "10"]
SLO = ["--slo", "ttft=0.5,itl=0.05"]


def report(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What `plan ... --json -` says."""
    assert main([*arguments, "--json", "-"]) == code
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_report(capsys: Capture) -> None:
    assert main([*SMALL, *SLO]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for words in (
        "factors: weight_bandwidth_efficiency 0.8",
        "wanted: 10 requests/s, 99% of them within ttft 0.5 s, itl 0.05 s",
        "Layouts tried",
        "meets it",
        "plan: 1 device: 1 replica with tensor_parallel_size 1, max_num_seqs ",
        "KV cache: ",
        "kv_cache_memory_bytes=",
        "headroom: ",
        "while requests wait: ",
    ):
        assert words in out


def test_json(capsys: Capture) -> None:
    loaded = report(capsys, *SMALL, *SLO, "--attainment", "0.95", "--max-devices", "4")
    assert set(loaded) == {
        "steploop_version",
        "device",
        "objective",
        "rate",
        "max_devices",
        "workload",
        "workload_options",
        "degrees",
        "trials",
        "chosen",
        "limits",
        "kv_budget",
        "breaking",
        "reason",
        "settings",
        "headroom",
    }
    assert loaded["objective"] == {"slo": {"ttft": 0.5, "itl": 0.05}, "attainment": 0.95}
    assert loaded["chosen"]["layout"] == {"tensor_parallel_size": 1, "num_replicas": 1}
    assert loaded["chosen"] in loaded["trials"]
    assert loaded["settings"]["max_num_seqs"] == loaded["chosen"]["limits"]["max_num_seqs"]
    assert loaded["workload_options"]["arrivals"] == "poisson:10"
    assert loaded["workload"]["prompt_tokens"]["count"] == 400
    assert [degree["tensor_parallel_size"] for degree in loaded["degrees"]] == [1, 2, 4]


def test_the_plan_is_what_simulate_says(capsys: Capture) -> None:
    found = report(capsys, *SMALL, *SLO)
    chosen = found["chosen"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen["limits"].items()]
    simulate = ["simulate", "llama-3-8b", "--device", "H100", "--num-requests", "400", "--arrivals", "poisson:10"]
    [run] = report(capsys, *simulate, *options, *SLO)["runs"]
    assert run["goodput"]["share_of_asked"] >= chosen["attainment"]
    assert run["occupancy"]["share_of_slots"] == chosen["share_of_slots"]
    assert run["workload"] == found["workload"]


def test_what_is_given_stays(capsys: Capture) -> None:
    fixed = ["--max-num-seqs", "32", "--tensor-parallel-size", "2", "--num-kv-blocks", "2000"]
    found = report(capsys, *SMALL, *SLO, *fixed)
    assert found["chosen"]["limits"]["max_num_seqs"] == 32
    assert found["chosen"]["layout"]["tensor_parallel_size"] == 2
    assert found["chosen"]["num_kv_blocks"] == 2000
    assert found["kv_budget"] is None


def test_conversations_policies_and_bursts(capsys: Capture) -> None:
    arguments = ["--turns", "uniform:1:4", "--shared-prefix", "200:4", "--routing", "prefix_affine"]
    arguments += ["--arrivals", "gamma:1:0.5", "--scheduling-policy", "reserve", "--queue-order", "shortest_first"]
    found = report(capsys, *SMALL, *SLO, *arguments, "--preemption-mode", "swap")
    assert found["chosen"] is not None
    assert found["settings"]["scheduling_policy"] == "reserve"
    assert found["workload_options"]["arrivals"] == "gamma:1:0.5"
    assert found["workload"]["conversations"]["count"] < 400


def test_recorded(tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i / 3, "prompt_tokens": 30 + i % 50, "output_tokens": 1 + i % 20} for i in range(200)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["plan", "llama-3-8b", "--device", "H100", "--rate", "10", *SLO, "--workload-file", str(trace)]
    found = report(capsys, *arguments)
    assert found["chosen"]["num_requests"] == 200
    assert found["workload"]["arrivals"]["rate"] == pytest.approx(10, rel=0.01)
    assert main([*arguments, "--speedup", "2"]) == 1
    assert "--speedup cannot be given with --rate" in capsys.readouterr().err


def test_a_folder(tiny_llama: Path, capsys: Capture) -> None:
    arguments = ["plan", str(tiny_llama), "--rate", "5", "--num-requests", "200", "--slo", "e2e=5"]
    arguments += ["--num-kv-blocks", "1000"]  # of so small a model memory holds millions
    found = report(capsys, *arguments, "--prompt-lengths", "fixed:20", "--output-lengths", "fixed:5")
    assert found["chosen"]["layout"] == {"tensor_parallel_size": 1, "num_replicas": 1}


def test_a_calibration(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "here.json"
    Calibration(
        device=DEVICES["L4"],
        model=MODELS["llama-3-8b"],
        weight_dtype="int8",
        kv_cache_dtype="bfloat16",
        about={},
        fit={},
        steps={},
    ).save(path)
    arguments = ["plan", "llama-3-8b", "--device", str(path), "--rate", "2", "--num-requests", "200", "--slo", "e2e=30"]
    found = report(capsys, *arguments)
    assert [degree["tensor_parallel_size"] for degree in found["degrees"]] == [1]
    assert found["settings"]["dtype"] == "int8"
    assert main([*arguments, "--tensor-parallel-size", "2"]) == 1
    assert "--tensor-parallel-size must be 1 for " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slo", "itl=0.0001"], "no plan: no number of replicas helps"),
        (["--slo", "ttft=1", "--max-devices", "1", "--dtype", "float32", "--device", "L4"], "do not fit L4"),
        (["--slo", "ttft=0.05", "--rate", "5000", "--max-devices", "2"], "no layout of at most 2 devices meets it"),
    ],
)
def test_nothing_is_found(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main([*SMALL, *arguments]) == 1
    captured = capsys.readouterr()
    assert words in captured.out
    assert captured.err == ""
    assert report(capsys, *SMALL, *arguments, code=1)["chosen"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "-1"], "--rate must be a finite number > 0, got -1"),
        (["--rate", "nan"], "--rate must be a finite number > 0, got nan"),
        (["--attainment", "0"], "attainment must be in (0, 1], got 0"),
        (["--attainment", "nan"], "attainment must be in (0, 1], got nan"),
        (["--max-devices", "0"], "--max-devices must be >= 1, got 0"),
        (["--max-devices", "2", "--tensor-parallel-size", "4"], "tensor_parallel_size must be at most max_devices, 2"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size must divide the 32 heads of llama-3-8b, got 3"),
        (["--slo", "itll=1"], "did you mean itl=SECONDS?"),
        (["--slo", "itl"], "an SLO must have the form itl=SECONDS"),
        (["--device", "H10"], "did you mean H100?"),
        (["--device", "none.json"], "none.json cannot be read"),
        (["--efficiency", "step_u=1"], "did you mean step_us?"),
        (["--efficiency", "step_us=fast"], "--efficiency must be NAME=NUMBER,..., got 'step_us=fast'"),
        (["--arrivals", "burst"], "burst has no rate"),
        (["--num-requests", "20"], "a plan needs at least 100 requests, got 20"),
        (["--num-kv-blocks", "10", "--kv-cache-memory-bytes", "10"], "kv_cache_memory_bytes"),
        (["--max-model-len", "10000"], "max_model_len must be <= 8192, the limit of llama-3-8b, got 10000"),
        (["--no-chunked-prefill", "--max-num-batched-tokens", "64"], "max_num_batched_tokens must be >= max_model_len"),
        (["--max-num-seqs", "0"], "max_num_seqs must be >= 1, got 0"),
        (["--prompt-lengths", "fixed:9000"], "request 0: "),
        (["--max-tokens", "3"], "max_tokens must be at least the longest output drawn"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json cannot be written"),
    ],
)
def test_refused(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main([*SMALL, *SLO, *arguments]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_unknown_model(capsys: Capture) -> None:
    assert main(["plan", "lama-3-8b", "--rate", "1", *SLO]) == 1
    assert "did you mean llama-3-8b?" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [["--rate", "1"], SLO])
def test_what_must_be_given(missing: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "llama-3-8b", *missing])
    assert caught.value.code == 2
    assert "required" in capsys.readouterr().err


def test_help_is_whole(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(PLAN_EPILOG.split()) in out
    assert "(default poisson)" in out


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom steploop.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch', 'rich', 'steploop._C')))"
    )
    for arguments in (["--help"], ["plan", "--help"], ["simulate", "--help"], ["calibrate", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60)
        assert run.returncode == 0, run.stderr
