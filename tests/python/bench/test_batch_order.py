"""bench/engine/batch_order.py from end to end on a tiny model, and how it sums up what it measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_every_order_on_a_tiny_model(run_script: Callable[..., Any]) -> None:
    arguments = ["--num-requests", "40", "--num-prefixes", "12", "--prefix", "128", "--slots", "2", "--repeats", "1"]
    result, printed, _ = run_script("batch_order.py", *arguments, "--dtype", "float32")
    assert result["answers_equal"] and "the same in every order" in printed
    orders = result["orders"]
    assert list(orders) == ["grouped", "input", "longest", "prefix"]
    assert len({run["num_prompt_tokens"] for run in result["runs"]}) == 1
    # Where lines that begin alike are neighbours, that is computed once; the cache has no room for all beginnings.
    assert orders["prefix"]["computed_prompt_tokens"][0] < 12 * 128 + 40 * 25
    assert orders["prefix"]["computed_prompt_tokens"][0] < orders["input"]["computed_prompt_tokens"][0] / 1.5
    assert orders["grouped"]["computed_prompt_tokens"][0] < orders["input"]["computed_prompt_tokens"][0] / 1.2
    assert orders["grouped"]["num_steps"][0] <= orders["prefix"]["num_steps"][0] * 1.1
    assert orders["input"]["of_input"] == [1, 1, 1]


def test_sums_up_quiet_runs_alone(bench_engine: Path) -> None:
    from batch_order import ORDERS, summarise

    def run(order: str, repeat: int, seconds: float, *, quiet: bool = True) -> dict[str, Any]:
        keys = ("duration", "tokens_per_second", "computed_prompt_tokens", "num_steps", "tail_s")
        return {"order": order, "repeat": repeat, "quiet": quiet, **dict.fromkeys(keys, seconds)}

    runs = [run(order, repeat, 4 + repeat) for order in ORDERS if order != "grouped" for repeat in range(2)]
    runs += [run("grouped", 0, 2), run("grouped", 1, 3, quiet=False)]
    summary = summarise(runs)
    assert summary["grouped"]["duration"] == [2, 2, 2]
    assert summary["grouped"]["of_input"] == [0.55, 0.5, 0.6]
    assert summary["input"]["duration"] == [4.5, 4, 5]
