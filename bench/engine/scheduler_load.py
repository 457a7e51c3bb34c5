"""Work for a scheduler without a model: requests that come and go, and the loop that times each step.

Two cases, in both of which as many requests run as may:
  decode  prompts of 128 to 143 tokens, outputs that do not end meanwhile; every step is one token for each
  churn   prompts of 128 tokens, outputs of 1 + Exp(64); whoever ends is replaced before the next step
All random, so that prefix caching files every block and finds none.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, Protocol

CASES = ("decode", "churn")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 8192
BLOCKS_PER_SEQUENCE = 64  # plenty: nobody is preempted
SEED = 20261129

_PROMPT, _MEAN_OUTPUT, _LONG_OUTPUT = 128, 64, 3000
_TOKEN_IDS = (1000, 40000)
_MAX_FILL_STEPS = 1000
_NUM_WARM_UP_STEPS = {"decode": 16, "churn": 64}


class Step(NamedTuple):
    """One schedule and one update."""

    schedule_ns: int
    update_ns: int
    num_sequences: int
    num_tokens: int
    num_finished: int


class LoneScheduler(Protocol):
    """What a worker script measures: a scheduler of `num_running` slots, and a stand-in for the model."""

    def add(self, request_id: int, prompt_token_ids: list[int], max_tokens: int) -> int:
        """Queues a request. Returns the nanoseconds that it took."""

    def step(self) -> Step:
        """Schedules, makes up a token for every sample row (not timed), updates."""

    def settle(self) -> None:
        """Called before the steps that count."""


def measure(
    make: Callable[[int], LoneScheduler], *, case: str, num_running: int, num_steps: int, min_seconds: float
) -> dict[str, Any]:
    """Rounds of `num_steps` steps, each with a scheduler of its own, until `min_seconds` are over.

    Returns:
        Microseconds per step, the median over rounds of a round's mean; the 50th and 99th percentile of all steps; and
        a digest of what was scheduled, which two schedulers that did the same work have in common.
    """
    started = time.monotonic()
    rounds: list[_Round] = []
    while not rounds or time.monotonic() - started < min_seconds:
        rounds.append(_run_round(make(num_running), case, num_running, num_steps))
    totals = sorted(step.schedule_ns + step.update_ns for each in rounds for step in each.steps)
    return {
        "num_rounds": len(rounds),
        "schedule_us": median(_mean_us([step.schedule_ns for step in each.steps]) for each in rounds),
        "update_us": median(_mean_us([step.update_ns for step in each.steps]) for each in rounds),
        "step_us": median(_mean_us([step.schedule_ns + step.update_ns for step in each.steps]) for each in rounds),
        "add_us": median(each.add_ns / 1e3 / num_steps for each in rounds),
        "step_us_p50": totals[(len(totals) - 1) // 2] / 1e3,
        "step_us_p99": totals[(len(totals) - 1) * 99 // 100] / 1e3,
        "mean_sequences": sum(step.num_sequences for step in rounds[0].steps) / num_steps,
        "mean_tokens": sum(step.num_tokens for step in rounds[0].steps) / num_steps,
        "mean_finished": sum(step.num_finished for step in rounds[0].steps) / num_steps,
        "work": rounds[0].digest,
    }


class _Round(NamedTuple):
    steps: list[Step]
    add_ns: int
    digest: str


def _run_round(scheduler: LoneScheduler, case: str, num_running: int, num_steps: int) -> _Round:
    source = _Requests(case)
    work = hashlib.sha256()

    def step() -> Step:
        done = scheduler.step()
        work.update(f"{done.num_sequences} {done.num_tokens} {done.num_finished};".encode())
        return done

    for _ in range(num_running):
        scheduler.add(*source.next())
    for _ in range(_MAX_FILL_STEPS):
        filled = step()
        for _ in range(filled.num_finished):
            scheduler.add(*source.next())
        if filled.num_sequences == num_running:
            break
    else:
        raise RuntimeError(f"{num_running} requests do not run at once after {_MAX_FILL_STEPS} steps")
    steps: list[Step] = []
    add_ns = 0
    for index in range(-_NUM_WARM_UP_STEPS[case], num_steps):
        if index == 0:
            scheduler.settle()
            add_ns = 0
        done = step()
        if index >= 0:
            steps.append(done)
        for _ in range(done.num_finished):
            add_ns += scheduler.add(*source.next())
    if case == "decode" and any(done[2:] != (num_running, num_running, 0) for done in steps):
        raise RuntimeError(f"a step did not decode {num_running} sequences")
    return _Round(steps, add_ns, work.hexdigest())


class _Requests:
    """The arguments of `add`, the same for every scheduler."""

    def __init__(self, case: str) -> None:
        if case not in CASES:
            raise ValueError(f"case must be one of {', '.join(CASES)}, got {case!r}")
        self._case = case
        self._generator = random.Random(SEED)
        self._num_made = 0

    def next(self) -> tuple[int, list[int], int]:
        index, generator = self._num_made, self._generator
        self._num_made += 1
        # In decode the sequences begin their next blocks at different steps, as they do once they have run for a while.
        length = _PROMPT + (index % BLOCK_SIZE if self._case == "decode" else 0)
        prompt = [generator.randrange(*_TOKEN_IDS) for _ in range(length)]
        drawn = 1 + int(generator.expovariate(1 / _MEAN_OUTPUT))
        return index, prompt, _LONG_OUTPUT if self._case == "decode" else drawn


def _mean_us(nanoseconds: list[int]) -> float:
    return sum(nanoseconds) / len(nanoseconds) / 1e3
