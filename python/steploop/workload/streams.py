"""Stream: the streams of random numbers that a workload is drawn from."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn has a stream of random numbers of its own, so that a change to one leaves the others alone. New
    ones are added at the end: those there are keep their numbers, and what they draw."""

    PROMPT_LENGTHS = 0
    OUTPUT_LENGTHS = 1
    ARRIVALS = 2
    CONTENTS = 3
    TURNS = 4
    THINK_TIMES = 5
    PREFIX_GROUPS = 6
    TENANTS = 7
    PRIORITIES = 8

    def generator(self, seed: int, *more: int) -> np.random.Generator:
        """The stream's generator. More numbers name a part of the stream."""
        return np.random.default_rng([seed, int(self), *more])
