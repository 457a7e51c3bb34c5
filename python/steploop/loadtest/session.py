"""A load test from opening the target to the figures of every run."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from steploop.errors import InvalidArgumentError, LoadTestError
from steploop.loadtest.figures import summarize_run
from steploop.loadtest.open_loop import RunResult, run_open_loop, unless_stopped
from steploop.loadtest.plan import Plan, PlannedRun
from steploop.loadtest.record import RequestFailure, RequestRecord
from steploop.loadtest.target import Target
from steploop.progress import RequestProgress
from steploop.workload import PromptMaker, WorkloadRequest


@dataclass(frozen=True)
class Prompts:
    """How prompts are made."""

    format: str
    """ "token_ids" or "text"."""
    vocab_size: int | None = None

    def make(self, maker: PromptMaker, segments: list[tuple[int, int]]) -> str | list[int]:
        """A prompt of these contents and lengths."""
        return maker.text_of(segments) if self.format == "text" else maker.token_ids_of(segments)


def choose_prompts(prompt_format: str | None, vocab_size: int | None, *, chat: bool) -> Prompts:
    """Token ids where they can be, unless told otherwise.

    Raises:
        InvalidArgumentError: token ids where they cannot be.
    """
    if prompt_format is None:
        prompt_format = "text" if chat or vocab_size is None else "token_ids"
    if prompt_format == "token_ids" and chat:
        raise InvalidArgumentError("--prompt-format must be text for chat, got token_ids")
    if prompt_format == "token_ids" and vocab_size is None:
        raise InvalidArgumentError(
            "--prompt-format token_ids needs --vocab-size or --tokenizer where the server does not say how many tokens "
            "it knows"
        )
    return Prompts(prompt_format, vocab_size)


async def run_all(target: Target, plan: Plan, prompts: Prompts) -> list[tuple[dict[str, Any], RunResult]]:
    """Makes the runs of a plan, one after another. After Ctrl-C the last of them is incomplete, and others missing.

    Raises:
        LoadTestError: a warm-up failed.
    """
    runs = []
    with _stop_at_interrupt() as stop:
        for number, planned in enumerate(plan.runs):
            maker = PromptMaker(planned.workload.seed, number, prompts.vocab_size)
            runs.append(await _run(target, plan, planned, prompts, maker, stop))
            if stop.is_set():
                break
    return runs


def check_aiohttp() -> None:
    """Whether there is an HTTP client.

    Raises:
        InvalidArgumentError: there is not.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise InvalidArgumentError("--url needs aiohttp; install it with: pip install 'steploop[bench]'")


async def _run(
    target: Target, plan: Plan, planned: PlannedRun, prompts: Prompts, maker: PromptMaker, stop: asyncio.Event
) -> tuple[dict[str, Any], RunResult]:
    workload, requests = planned.workload, planned.workload.requests

    def prepare(request: WorkloadRequest, segments: list[tuple[int, int]]) -> Any:
        options: dict[str, Any] = {} if request.priority is None else {"priority": request.priority}
        if request.tenant is not None:
            options["tenant"] = f"tenant-{request.tenant}"
        return target.prepare(prompts.make(maker, segments), request.num_output_tokens, **options)

    prepared = [prepare(request, workload.prompt_segments(index)) for index, request in enumerate(requests)]
    # As long as the first requests, with prompts of their own.
    warmups = [
        prepare(request, [(workload.num_contents + index, request.num_prompt_tokens)])
        for index, request in enumerate(itertools.islice(itertools.cycle(requests), plan.num_warmups))
    ]
    await unless_stopped(stop, _warm_up(target, warmups, plan.limits.timeout))
    with RequestProgress(len(requests)) as progress:
        result = await run_open_loop(
            target,
            requests,
            prepared,
            plan.limits,
            stop=stop,
            report=lambda num_ended, num_tokens: progress.update(num_finished=num_ended, num_tokens=num_tokens),
        )
    summary = workload.summary()
    share_known = summary.get("known_prompt_tokens", {"share": 0.0})["share"]
    figures = summarize_run(result, plan.slo, plan.num_warmups, share_known)
    return {"rate": planned.rate, "workload": summary} | figures, result


async def _warm_up(target: Target, prepared: list[Any], timeout: float | None) -> None:
    async def send(index: int, of_request: Any) -> None:
        await asyncio.wait_for(target.send(of_request, RequestRecord(index, 0.0, 0, 0)), timeout)

    try:
        await asyncio.gather(*(send(index, of_request) for index, of_request in enumerate(prepared)))
    except RequestFailure as failure:
        raise LoadTestError(f"a warm-up request failed ({failure.kind}): {failure}") from None
    except asyncio.TimeoutError:
        raise LoadTestError(f"a warm-up request was not over after {timeout:g} s") from None


@contextmanager
def _stop_at_interrupt() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets, the first time; the second raises KeyboardInterrupt as ever."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    in_main_thread = threading.current_thread() is threading.main_thread()  # others get no signals
    if in_main_thread:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        if in_main_thread:
            loop.remove_signal_handler(signal.SIGINT)
