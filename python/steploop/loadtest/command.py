"""The command `steploop bench`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

import steploop
from steploop.engine_arguments import engine_config
from steploop.loadtest import text_report
from steploop.loadtest.figures import request_rows
from steploop.loadtest.open_loop import RunResult
from steploop.loadtest.plan import Plan, make_plan
from steploop.loadtest.plot import write_plot
from steploop.loadtest.session import check_aiohttp, choose_prompts, run_all
from steploop.loadtest.target import TargetDescription
from steploop.reporting import make_console, write_json

EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130

_WIDTH = 110  # where the report goes into a file

Runs = list[tuple[dict[str, Any], RunResult]]


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs the command; the report goes to standard output, or with --json - to standard error.

    Returns:
        0 if any request was completed, 1 if none was, 130 after Ctrl-C.

    Raises:
        SteploopError: anything the user can mend.
    """
    plan = make_plan(arguments)
    console = make_console(arguments.json, width=_WIDTH)
    about, runs = _test_engine(arguments, plan) if arguments.url is None else _test_server(arguments, plan)
    _print(console, about, runs)
    if plan.json_path is not None:
        write_json(plan.json_path, _as_json(plan, about, runs))
    if plan.plot_path is not None:
        write_plot(plan.plot_path, f"steploop bench: {Path(about['model']).name}", runs)
        console.print(f"\nThe picture is in {plan.plot_path}.", highlight=False)
    if any(run["incomplete"] for run, _ in runs):
        return EXIT_INTERRUPTED
    return 0 if any(run["requests"]["completed"] for run, _ in runs) else EXIT_ALL_FAILED


def _test_engine(arguments: argparse.Namespace, plan: Plan) -> tuple[dict[str, Any], Runs]:
    from steploop.async_engine import AsyncLLMEngine
    from steploop.loadtest.engine_target import STATS_CAPACITY, EngineTarget

    config = dataclasses.replace(engine_config(arguments), iteration_stats_capacity=STATS_CAPACITY)
    engine = AsyncLLMEngine(config, trace=arguments.trace)
    try:
        target = EngineTarget(engine, temperature=plan.temperature)
        description = target.describe()
        prompts = choose_prompts(arguments.prompt_format, arguments.vocab_size or description.vocab_size, chat=False)
        return _about(description, prompts.format), asyncio.run(run_all(target, plan, prompts))
    finally:
        engine.close()


def _test_server(arguments: argparse.Namespace, plan: Plan) -> tuple[dict[str, Any], Runs]:
    check_aiohttp()
    vocab_size = arguments.vocab_size
    if vocab_size is None and arguments.tokenizer is not None:
        vocab_size = _vocab_size(arguments.tokenizer)
    return asyncio.run(_talk_to_server(arguments, plan, vocab_size))


async def _talk_to_server(
    arguments: argparse.Namespace, plan: Plan, vocab_size: int | None
) -> tuple[dict[str, Any], Runs]:
    from steploop.loadtest.http_target import HttpTarget

    target = HttpTarget(
        arguments.url,
        endpoint=arguments.endpoint,
        api_key=arguments.api_key,
        temperature=plan.temperature,
        extra_body=plan.extra_body,
    )
    try:
        description = await target.describe(arguments.served_model)
        prompts = choose_prompts(
            arguments.prompt_format, vocab_size or description.vocab_size, chat=arguments.endpoint == "chat"
        )
        return _about(description, prompts.format), await run_all(target, plan, prompts)
    finally:
        await target.close()


def _vocab_size(tokenizer: str) -> int:
    from steploop.tokenizer import Tokenizer
    from steploop.weights import find_tokenizer

    return len(Tokenizer.load(find_tokenizer(tokenizer)).hf)


def _about(description: TargetDescription, prompt_format: str) -> dict[str, Any]:
    return {"model": description.name, "prompt_format": prompt_format, **description.about}


def _print(console: Console, about: dict[str, Any], runs: Runs) -> None:
    console.print(", ".join(f"{name}: {value}" for name, value in about.items()), markup=False, highlight=False)
    for run, _ in runs:
        if len(runs) > 1:
            console.rule(f"{run['rate']:g} requests/s")
        text_report.print_workload(console, run["workload"])
        text_report.print_run(console, run)
    if len(runs) > 1:
        console.print()
        text_report.print_sweep(console, [run for run, _ in runs])


def _as_json(plan: Plan, about: dict[str, Any], runs: Runs) -> dict[str, Any]:
    return {
        "steploop_version": steploop.__version__,
        "target": about,
        "workload": plan.specs,
        "settings": {
            "max_concurrency": plan.limits.max_concurrency,
            "timeout": plan.limits.timeout,
            "temperature": plan.temperature,
            "extra_body": plan.extra_body,
        },
        "runs": [run | {"records": request_rows(result)} for run, result in runs],
    }
