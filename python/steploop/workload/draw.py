"""Draws a workload: when each request arrives and how long its prompt and its output are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from steploop.checks import checked_int
from steploop.workload.arrivals import Arrivals
from steploop.workload.lengths import Lengths
from steploop.workload.summary import summarize


@dataclass(frozen=True)
class WorkloadRequest:
    """One request, without its prompt's content."""

    arrival_time: float
    """Seconds from the first request's arrival."""
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrive."""

    requests: list[WorkloadRequest]
    seed: int

    def summary(self) -> dict[str, Any]:
        """What was drawn; see `steploop.workload.summary`."""
        return summarize(
            [request.num_prompt_tokens for request in self.requests],
            [request.num_output_tokens for request in self.requests],
            [request.arrival_time for request in self.requests],
        )


class Stream(IntEnum):
    """What is drawn has a stream of random numbers of its own, so that a change to one leaves the others alone."""

    PROMPT_LENGTHS = 0
    OUTPUT_LENGTHS = 1
    ARRIVALS = 2
    CONTENTS = 3

    def generator(self, seed: int, *more: int) -> np.random.Generator:
        """The stream's generator. More numbers name a part of the stream."""
        return np.random.default_rng([seed, int(self), *more])


def draw_workload(
    num_requests: int, *, lengths: tuple[Lengths, Lengths], arrivals: Arrivals, seed: int = 0
) -> Workload:
    """The same for the same arguments (and the same numpy: its streams may change between versions).

    Args:
        lengths: Of prompts and of outputs.
        seed: >= 0.

    Raises:
        InvalidArgumentError: a number out of range, or more requests than were recorded.
    """
    count = checked_int("num_requests", num_requests, low=1)
    seed = checked_int("seed", seed, low=0, high=2**64 - 1)
    prompts = lengths[0].draw(Stream.PROMPT_LENGTHS.generator(seed), count).tolist()
    outputs = lengths[1].draw(Stream.OUTPUT_LENGTHS.generator(seed), count).tolist()
    times = arrivals.draw(Stream.ARRIVALS.generator(seed), count).tolist()
    return Workload([WorkloadRequest(*request) for request in zip(times, prompts, outputs, strict=True)], seed)
