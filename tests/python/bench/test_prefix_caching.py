"""bench/engine/prefix_caching.py from end to end on a tiny model, and how it sums up what it measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_all_parts_on_a_tiny_model(run_script: Callable[..., Any]) -> None:
    arguments = ["--num-requests", "20", "--prefix", "64", "--repeats", "1"]
    result, printed, _ = run_script("prefix_caching.py", *arguments)

    shared = result["shared"]
    assert shared["answers_equal"]
    assert shared["no_caching"]["hit_tokens"] == [0, 0, 0]
    assert shared["no_caching"]["context_tokens"][0] == shared["num_prompt_tokens"]
    # The prefix is computed once, though all were offered at once.
    assert shared["caching"]["hit_tokens"][0] == 19 * 64
    assert shared["caching"]["context_tokens"][0] == shared["num_prompt_tokens"] - 19 * 64

    # 32 tokens more each: two blocks. A sample computes the prompt's last token anew, in a block of its own.
    samples = result["samples"]
    assert samples["prompt_blocks"] == 4 and samples["peak_blocks_of_requests"] == 8 * (4 + 2)
    assert samples["peak_blocks"] == 4 + 8 * 2  # the prompt once, and what each sample added

    overhead = result["overhead"]
    assert overhead["answers_equal"]
    assert overhead["caching"]["hit_tokens"] == overhead["no_caching"]["hit_tokens"] == [0, 0, 0]
    runs = {run["caching"]: run for run in result["runs"] if run["part"] == "overhead"}
    assert runs[True]["cached_blocks_before"] > 0 and runs[True]["queried_tokens"] > 0
    assert runs[False]["cached_blocks_before"] == 0 and runs[True]["num_steps"] == runs[False]["num_steps"]
    assert printed.count("the same bits") == 2 and "n=8 of a prompt of 4 blocks" in printed


def shared_run(caching: bool, seconds: float, *, quiet: bool = True, answer: int = 5) -> dict[str, Any]:
    figures = dict.fromkeys(("prompt_steps_s", "duration", "hit_tokens", "context_tokens"), seconds)
    run = {"caching": caching, "first_tokens_s": seconds, "quiet": quiet, "num_prompt_tokens": 9, "answers": [answer]}
    return run | figures


def test_sums_up_quiet_runs_alone(bench_engine: Path) -> None:
    from prefix_report import summarise_shared

    runs = [shared_run(True, 2), shared_run(False, 20), shared_run(True, 9, quiet=False), shared_run(False, 30)]
    summary = summarise_shared(runs)
    assert summary["caching"]["first_tokens_s"] == [2, 2, 2]
    assert summary["no_caching"]["first_tokens_s"] == [25, 20, 30]
    assert summary["first_tokens_ratio"] == 12.5 and summary["num_quiet_runs"] == 3 and summary["answers_equal"]
    assert not summarise_shared([*runs, shared_run(True, 2, answer=6)])["answers_equal"]


def test_overhead_is_a_share_of_a_step(bench_engine: Path) -> None:
    from prefix_report import summarise_overhead

    def run(caching: bool, beside_model_us: float) -> dict[str, Any]:
        figures = {"step_ms": 20.0, "schedule_us": 1.0, "update_us": 1.0, "hit_tokens": 0}
        return {"caching": caching, "quiet": True, "answers": [], "beside_model_us": beside_model_us, **figures}

    summary = summarise_overhead([run(True, 50), run(False, 40), run(True, 54), run(False, 40)])
    assert summary["added_us"] == 12 and summary["added_share"] == pytest.approx(0.0006)
    assert summary["step_time_change"] == 0
