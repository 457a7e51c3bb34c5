"""The demo's results: answers, the table of both runs, the chart, and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steploop.demo.measure import Run, same_tokens
from steploop.demo.picture import text_chart
from steploop.demo.prompts import PROMPTS
from steploop.text import shorten

TITLES = {"on_demand": "continuous batching", "static": "static batches"}

_CHART_WIDTH = 72
_ANSWER_LENGTH = 200


def as_json(model: str, runs: list[Run], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything a machine may want of both runs; times in seconds."""
    first = runs[0]
    return {
        "model": model,
        "settings": settings,
        "tokens_equal": same_tokens(*runs),
        "runs": [run.summary() | {"spans": run.spans} for run in runs],
        "answers": [
            {
                "prompt": prompt.text,
                "text": output.outputs[0].text,
                "token_ids": output.outputs[0].token_ids,
                "finish_reason": output.outputs[0].finish_reason,
            }
            for prompt, output in zip(PROMPTS, first.outputs, strict=True)
        ],
    }


def print_answers(console: Console, run: Run) -> None:
    """Every question with the start of its answer; " […]" marks one that its token limit ended."""
    for number, (prompt, output) in enumerate(zip(PROMPTS, run.outputs, strict=True), start=1):
        completion = output.outputs[0]
        # As Text, so that nothing a model writes is taken for markup.
        console.print(Text(f"{number:2}. {prompt.text}", style="bold"), soft_wrap=True)
        cut = " […]" if completion.finish_reason == "length" else ""
        answer = shorten(completion.text + cut, _ANSWER_LENGTH)
        console.print(Text(f"    {answer}  ({len(completion.token_ids)} tokens)"), soft_wrap=True)


def print_table(console: Console, runs: list[Run]) -> None:
    """The figures of both runs, and how they compare."""
    table = Table(title="Same prompts, slots, token budget, KV cache and kernels")
    table.add_column("")
    for run in runs:
        table.add_column(TITLES[run.policy], justify="right")
    table.add_column("ratio", justify="right")
    continuous, static = (run.summary() for run in runs)

    def row(label: str, key: str, show: str, factor: float = 1.0, *, ratio: bool = True) -> None:
        a, b = continuous[key] * factor, static[key] * factor
        table.add_row(label, format(a, show), format(b, show), f"{a / b:.2f}x" if ratio and b else "")

    row("throughput, output tokens/s", "throughput", ".1f")
    row("duration, s", "duration", ".2f")
    row("output tokens", "num_output_tokens", ".0f", ratio=False)
    row("time to first token, p50, ms", "ttft_p50", ".0f", 1e3)
    row("time to first token, p99, ms", "ttft_p99", ".0f", 1e3)
    row("inter-token latency, p50, ms", "inter_token_latency_p50", ".1f", 1e3)
    row("inter-token latency, p99, ms", "inter_token_latency_p99", ".1f", 1e3)
    row("mean batch occupancy over the steps, %", "mean_occupancy", ".0f", 1e2)
    row("steps", "num_steps", ".0f")
    row("preemptions", "num_preemptions", ".0f", ratio=False)
    console.print(table)
    equal = same_tokens(*runs)
    verdict = "the same tokens, checked one by one" if equal else "DIFFERENT tokens, which is a bug"
    console.print(f"Greedy: both runs gave {verdict}.", style="" if equal else "bold red", highlight=False)


def print_charts(console: Console, runs: list[Run]) -> None:
    """Both runs' slots over the same time."""
    duration = max(run.duration for run in runs)
    width = max(24, min(_CHART_WIDTH, console.width - 10))
    for run in runs:
        console.print(f"\n{TITLES[run.policy]}: slots over time, blank where a slot idles", highlight=False)
        for slot, line in enumerate(text_chart(run, width=width, duration=duration)):
            console.print(Text(f"slot {slot:2} |{line}|"), soft_wrap=True)
    console.print(f"         0 s{format(duration, '.1f').rjust(width - 4)} s", highlight=False)
