"""The command `steploop demo`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from steploop.config import EngineConfig
from steploop.demo import report
from steploop.demo.measure import Run, run_prompts
from steploop.demo.model import find_demo_model
from steploop.demo.picture import svg
from steploop.demo.prompts import PROMPTS
from steploop.demo.view import DemoView
from steploop.engine import LLMEngine
from steploop.errors import InvalidArgumentError, InvalidRequestError

# Longer than any of the prompts with its answer.
_MAX_MODEL_LEN = 512


def run_demo(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        SteploopError: no model, or one that cannot chat; a picture that cannot be written.
    """
    picture = None if arguments.picture is None else Path(arguments.picture)
    if picture is not None and (picture.suffix != ".svg" or not picture.parent.is_dir()):
        raise InvalidArgumentError(f"--picture must be a .svg file in a folder that exists, got {arguments.picture}")
    model = str(arguments.model or find_demo_model())
    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "device": arguments.device,
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_model_len": _MAX_MODEL_LEN,
        "kv_cache_memory_bytes": arguments.kv_cache_memory_bytes,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "num_threads": arguments.num_threads,
    }
    console = Console(stderr=arguments.json)
    continuous = _run(model, settings, "on_demand", console, quiet=arguments.json)
    # The very same cache: sized anew, it would follow what memory is free by then.
    same_cache = settings | {"kv_cache_memory_bytes": None, "num_kv_blocks": continuous.num_kv_blocks}
    runs = [continuous, _run(model, same_cache, "static", console, quiet=arguments.json)]
    if picture is not None:
        _write_picture(picture, runs)
    if arguments.json:
        json.dump(report.as_json(model, runs, settings), sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
        return
    report.print_answers(console, runs[0])
    console.print()
    report.print_table(console, runs)
    report.print_charts(console, runs)
    if picture is not None:
        console.print(f"\nThe picture is in {picture}.", highlight=False)


def _run(model: str, settings: dict[str, Any], policy: str, console: Console, *, quiet: bool) -> Run:
    if not quiet:
        console.print(f"Loading {Path(model).name} for {report.TITLES[policy]} …", highlight=False)
    with LLMEngine(EngineConfig(model=model, scheduling_policy=policy, **settings)) as engine:
        if engine.tokenizer is None:
            raise InvalidRequestError(f"{model} has no tokenizer, so it cannot chat")
        if quiet:
            return run_prompts(engine, PROMPTS)
        with DemoView(console) as view:
            run = run_prompts(engine, PROMPTS, view.update)
    console.print(
        f"{report.TITLES[policy]}: {len(PROMPTS)} answers in {run.duration:.1f} s, {run.throughput:.0f} tokens/s",
        highlight=False,
    )
    return run


def _write_picture(path: Path, runs: list[Run]) -> None:
    titles = [
        f"{report.TITLES[run.policy]}: {run.duration:.1f} s, {run.throughput:.0f} tokens/s, "
        f"{run.mean_occupancy:.0%} of the slots busy"
        for run in runs
    ]
    try:
        path.write_text(svg(runs, titles, [prompt.text for prompt in PROMPTS]), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"the picture cannot be written: {error}") from None
