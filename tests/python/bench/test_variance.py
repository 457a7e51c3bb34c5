"""bench/engine/variance.py: its requests, its sums, its tables and its plot, and from end to end on a tiny model."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest


def test_outputs_are_exponential_and_drawn_again_above_the_cap(bench_engine: Path) -> None:
    from variance import make_workload

    lengths = {cap: [request.num_output_tokens for request in make_workload(cap, 4000)] for cap in (16, 64, 256, 512)}
    for cap, drawn in lengths.items():
        assert 1 <= min(drawn) and max(drawn) <= cap
        assert drawn.count(cap) < 4000 / cap * 1.5  # cut to the cap, far more would have it
    # Of an exponential of mean 64 cut off at c: 64 - c / (e^(c/64) - 1); half a token more, since lengths are whole.
    means = {cap: mean(drawn) for cap, drawn in lengths.items()}
    assert means == pytest.approx({16: 8.2, 64: 27.3, 256: 59.7, 512: 64.3}, rel=0.05)


def test_requests_never_change(bench_engine: Path) -> None:
    from variance import make_workload

    by_cap = {cap: make_workload(cap, 48) for cap in (16, 64, 256, 512)}
    prompts = [request.prompt_token_ids for request in by_cap[16]]
    assert all([request.prompt_token_ids for request in requests] == prompts for requests in by_cap.values())
    assert all(16 <= len(prompt) <= 48 for prompt in prompts)
    assert {cap: sum(request.num_output_tokens for request in requests) for cap, requests in by_cap.items()} == {
        16: 406,
        64: 1314,
        256: 3432,
        512: 3910,
    }
    assert all(token < 300 for request in make_workload(16, 4, 300) for token in request.prompt_token_ids)


def test_kv_sizes(bench_engine: Path) -> None:
    from variance import num_kv_blocks

    assert [num_kv_blocks(16, share, 16) for share in (1, 0.5, 0.25)] == [64, 32, 16]
    assert [num_kv_blocks(512, share, 16) for share in (1, 0.5, 0.25)] == [560, 280, 140]
    assert num_kv_blocks(16, 0.25, 2) == 4  # one sequence must fit


def run_of(policy: str, throughput: float, *, cap: int = 16, quiet: bool = True, outputs: str = "o") -> dict[str, Any]:
    from variance_report import FIGURES

    run = {"cap": cap, "kv_share": 0.5, "policy": policy, "throughput": throughput, "quiet": quiet, "outputs": outputs}
    return run | {"num_kv_blocks": 32} | dict.fromkeys(FIGURES, 0.25)


def test_only_quiet_runs_count(bench_engine: Path) -> None:
    from variance import summarise

    runs = [run_of("static", 100), run_of("static", 10, quiet=False), run_of("static", 120)]
    runs += [run_of("reserve", 10, quiet=False)]
    static, reserve = summarise(runs)
    assert (static["throughput"], static["num_runs"], static["num_quiet_runs"]) == ([110, 100, 120], 3, 2)
    assert (reserve["throughput"], reserve["num_runs"], reserve["num_quiet_runs"]) == ([10, 10, 10], 1, 0)


def test_tells_when_outputs_differ(bench_engine: Path) -> None:
    from variance import outputs_equal

    runs = [run_of("static", 1), run_of("reserve", 1), run_of("static", 1, cap=64, outputs="other")]
    assert outputs_equal(runs)
    assert not outputs_equal([*runs, run_of("estimate", 1, outputs="other")])


def test_tables(bench_engine: Path) -> None:
    from script import POLICIES
    from variance import summarise
    from variance_report import format_tables

    runs = [run_of(policy, 100 + 50 * i, cap=cap) for i, policy in enumerate(POLICIES) for cap in (16, 64)]
    settings = {"model": "m", "dtype": "bfloat16", "isa": "avx2", "num_threads": None, "num_requests": 4}
    result = {
        "machine": {"cpu": "a processor", "cores": 2, "memory_gib": 8},
        "settings": settings | {"max_num_seqs": 16, "max_num_batched_tokens": 8, "repeats": 1},
        "summary": summarise(runs),
        "outputs_equal": True,
    }
    text = format_tables(result)
    assert "| KV cache | policy | 16 | 64 |" in text
    assert "| KV for 8 of 16 slots | `static` | 100 (1.00x) | 100 (1.00x) |" in text
    assert "| KV for 8 of 16 slots | `estimate` | 250 (2.50x) | 250 (2.50x) |" in text
    assert "| KV for 8 of 16 slots, 32 blocks | `reserve` | 150 [150-150] | 25 | 25 | 0.25 | 0.25 | 0.25 |" in text
    assert "Every request had the same tokens" in text and "Only quiet runs count" in text
    noisy = summarise([*runs[1:], run_of("static", 1, quiet=False)])
    assert "NOT quiet in any run of 1 of 8 cells" in format_tables(result | {"summary": noisy})


def test_every_policy_on_a_tiny_model(run_script: Callable[..., Any]) -> None:
    arguments = ["--caps", "4", "40", "--kv-shares", "1", "0.5", "--num-requests", "12", "--max-num-seqs", "4"]
    result, printed, output = run_script("variance.py", *arguments, "--repeats", "2", "--dtype", "float32")
    assert result["outputs_equal"] and len(result["runs"]) == 2 * 2 * 2 * 4 and len(result["summary"]) == 16
    assert [run["policy"] for run in result["runs"][:4]] == ["static", "reserve", "on_demand", "estimate"]
    for run in result["runs"]:
        assert run["throughput"] == pytest.approx(run["num_output_tokens"] / run["duration"])
        assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= run["latency_p99"] <= run["duration"]
        assert 0 < run["mean_occupancy"] <= 1 and 0 < run["mean_kv_use"] <= 1
        assert run["num_preemptions"] == 0 or run["policy"] in ("on_demand", "estimate")
    steps = {(cell["kv_share"], cell["policy"]): cell["mean_occupancy"][0] for cell in result["summary"][8:]}
    assert steps[1.0, "static"] < steps[1.0, "reserve"]
    assert "| KV for 2 of 4 slots | `on_demand` |" in printed

    svg = ElementTree.parse(output.with_suffix(".svg")).getroot()
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"static", "estimate", "KV for 4 of 4 slots", "KV for 2 of 4 slots", "4", "40"} <= set(texts)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 16


def test_lines_are_drawn_to_scale(bench_engine: Path) -> None:
    from chart import Line, Panel, line_chart

    panel = Panel("a < b", [Line("one", [(100, 80, 110), (390, 390, 390)])])
    svg = ElementTree.fromstring(line_chart([panel], ["x", "y"], x_label="l & m", y_label="n"))
    names = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "l & m", "n", "0", "50", "400"} <= set(names) and "450" not in names
    bottom, top = (
        next(
            float(text.attrib["y"])
            for text in svg.iter("{http://www.w3.org/2000/svg}text")
            if text.text == name and text.attrib.get("text-anchor") == "end"
        )
        - 4
        for name in ("0", "400")
    )
    heights = [float(circle.attrib["cy"]) for circle in svg.iter("{http://www.w3.org/2000/svg}circle")]
    assert heights == pytest.approx([bottom - (bottom - top) * value / 400 for value in (100, 390)], abs=0.1)
