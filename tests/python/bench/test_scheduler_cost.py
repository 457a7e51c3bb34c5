"""bench/engine/scheduler_cost.py: its work and sums; from end to end with stand-ins for vLLM and the C++ program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import steploop


class StandIn:
    """Runs whatever is added at once: prompts whole, then a token a step."""

    num_settled = 0

    def __init__(self, num_running: int) -> None:
        self.left: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}

    def add(self, request_id: int, prompt_token_ids: list[int], max_tokens: int) -> int:
        self.prompts[request_id] = prompt_token_ids
        self.left[request_id] = max_tokens
        return 7

    def step(self) -> Any:
        from scheduler_load import Step

        num_sequences = len(self.left)
        num_tokens = sum(len(self.prompts.pop(request_id, [0])) for request_id in self.left)
        self.left = {request_id: left - 1 for request_id, left in self.left.items() if left > 1}
        return Step(2000, 1000, num_sequences, num_tokens, num_sequences - len(self.left))

    def settle(self) -> None:
        StandIn.num_settled += 1


def test_decode_keeps_all_running(bench_engine: Path) -> None:
    from scheduler_load import measure

    StandIn.num_settled = 0
    figures = measure(StandIn, case="decode", num_running=32, num_steps=10, min_seconds=0)
    assert (figures["schedule_us"], figures["update_us"], figures["step_us"]) == (2, 1, 3)
    assert (figures["step_us_p50"], figures["step_us_p99"], figures["add_us"]) == (3, 3, 0)
    assert (figures["mean_sequences"], figures["mean_tokens"], figures["mean_finished"]) == (32, 32, 0)
    assert figures["num_rounds"] == StandIn.num_settled == 1


def test_churn_replaces_who_ends(bench_engine: Path) -> None:
    from scheduler_load import measure

    figures = measure(StandIn, case="churn", num_running=64, num_steps=200, min_seconds=0)
    assert figures["mean_sequences"] == 64
    # Outputs are 1 + floor(Exp(64)), so one in 64.5 sequences ends in a step; a prompt of 128 comes in its place.
    assert figures["mean_finished"] == pytest.approx(64 / 64.5, rel=0.25)
    assert figures["mean_tokens"] == pytest.approx(64 + 127 * figures["mean_finished"], rel=0.05)
    assert figures["add_us"] == pytest.approx(0.007 * figures["mean_finished"])


def test_prompts_share_no_block_and_decode_enters_blocks_at_all_steps(bench_engine: Path) -> None:
    from scheduler_load import _Requests

    source = _Requests("decode")
    prompts = [source.next()[1] for _ in range(32)]
    assert [len(prompt) for prompt in prompts] == [128 + index % 16 for index in range(32)]
    blocks = [tuple(prompt[i : i + 16]) for prompt in prompts for i in range(0, 128, 16)]
    assert len(set(blocks)) == len(blocks)
    churn = _Requests("churn")
    assert mean(churn.next()[2] for _ in range(2000)) == pytest.approx(64.5, rel=0.1)
    with pytest.raises(ValueError, match="case must be one of decode, churn, got 'idle'"):
        _Requests("idle")


def test_the_work_is_told_apart(bench_engine: Path) -> None:
    from scheduler_load import measure

    class Slower(StandIn):
        def step(self) -> Any:
            return super().step()._replace(schedule_ns=9)

    class Other(StandIn):
        def step(self) -> Any:
            step = super().step()
            return step._replace(num_tokens=step.num_tokens + (step.num_finished > 0))

    asked: dict[str, Any] = {"case": "churn", "num_running": 8, "num_steps": 50, "min_seconds": 0}
    works = [measure(each, **asked)["work"] for each in (StandIn, Slower, Other)]
    assert works[0] == works[1] != works[2]


def test_decode_that_ends_is_no_decode(bench_engine: Path) -> None:
    from scheduler_load import measure

    class Short(StandIn):
        def add(self, request_id: int, prompt_token_ids: list[int], max_tokens: int) -> int:
            return super().add(request_id, prompt_token_ids, min(max_tokens, 20))

    with pytest.raises(RuntimeError, match="a step did not decode 4 sequences"):
        measure(Short, case="decode", num_running=4, num_steps=16, min_seconds=0)


def run_of(scheduler: str, step_us: float, quiet: bool = True, work: str = "same") -> dict[str, Any]:
    figures = {"step_us": step_us} | ({} if scheduler == "steploop_cpp" else {"work": work})
    return {"scheduler": scheduler, "case": "decode", "num_running": 64, "quiet": quiet, **figures}


def test_only_quiet_runs_count(bench_engine: Path) -> None:
    from scheduler_cost import summarise

    runs = [run_of("steploop_cpp", 2), run_of("steploop_scheduler", 4), run_of("vllm_scheduler", 800)]
    runs += [run_of("steploop_cpp", 3), run_of("steploop_scheduler", 99, quiet=False), run_of("vllm_scheduler", 1000)]
    runs += [run_of("steploop_cpp", 2), run_of("steploop_scheduler", 6), run_of("vllm_scheduler", 1000)]
    entry = summarise(runs)["decode/64"]
    assert entry["schedulers"]["steploop_scheduler"] == {"num_runs": 3, "num_quiet_runs": 2, "step_us": [5, 4, 6]}
    assert entry["ratios"] == {"vllm / steploop_cpp": 500, "vllm / steploop_scheduler": 200}
    assert entry["same_work"]
    noisy = summarise([run_of("steploop_scheduler", 9, quiet=False)])["decode/64"]
    assert noisy["schedulers"]["steploop_scheduler"] == {"num_runs": 1, "num_quiet_runs": 0, "step_us": [9, 9, 9]}
    assert noisy["ratios"] == {}


def test_other_work_is_no_comparison(bench_engine: Path) -> None:
    from scheduler_cost import format_report, summarise

    summary = summarise([run_of("steploop_scheduler", 4), run_of("vllm_scheduler", 800, work="other")])
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8}
    assert "step by step: NO" in format_report({"machine": machine, "versions": {}, "summary": summary})


CPP_STAND_IN = """#!/bin/sh
[ "$1" = --json ] || exit 9
for name in decode/4_running decode/4_running/no_prefix_caching churn/4_running decode/40_running; do
  echo "{\\"name\\": \\"scheduler/$name\\", \\"median_us\\": 1.5, \\"min_us\\": 1, \\"max_us\\": 2, \\"repeats\\": 25}"
done
"""


def test_measures_all_three(bench_engine: Path, tmp_path: Path) -> None:
    # vLLM's Python is one that runs steploop's worker whatever it is asked to run, and has to find it again.
    package = Path(steploop.__file__).parents[1]
    worker = bench_engine / "steploop_scheduler_worker.py"
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} {worker} "$2"\n')
    (tmp_path / "bench_scheduler").write_text(CPP_STAND_IN)
    for name in ("python", "bench_scheduler"):
        (tmp_path / name).chmod(0o755)
    small = ["--num-running", "4", "6", "--steps", "8", "--min-seconds", "0", "--repeats", "2", "--wait-quiet", "0"]
    programs = [
        "--vllm-python",
        tmp_path / "python",
        "--model",
        tmp_path,
        "--cpp-program",
        tmp_path / "bench_scheduler",
    ]
    output = tmp_path / "results" / "scheduler_cost.json"
    done = subprocess.run(
        [sys.executable, bench_engine / "scheduler_cost.py", *small, *programs, "--output", output],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert set(result["summary"]) == {"decode/4", "decode/6", "churn/4", "churn/6"}
    assert len(result["runs"]) == 2 * (2 * 3 + 2 * 2)  # the C++ program has no case of 6
    turns = [run["scheduler"] for run in result["runs"]]
    assert turns[:5] == ["steploop_cpp", "steploop_scheduler", "vllm_scheduler", "steploop_scheduler", "vllm_scheduler"]
    entry = result["summary"]["decode/4"]
    assert entry["same_work"] and entry["schedulers"]["steploop_cpp"]["step_us"] == [1.5, 1.5, 1.5]
    assert entry["ratios"]["vllm / steploop_cpp"] > 0
    for run in result["runs"]:
        if run["scheduler"] != "steploop_cpp":
            assert run["step_us"] >= run["step_us_p50"] * 0.5 > 0
            assert run["mean_sequences"] == run["num_running"]
            assert set(run["cores"]) == {"steploop_scheduler", "vllm_scheduler", "others", "stolen"}
    assert "decode, 4 running" in done.stdout and "the same work, step by step: yes" in done.stdout
    assert str(tmp_path) not in output.read_text()
