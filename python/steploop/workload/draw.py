"""Draws a workload: when each request arrives and how long its prompt and its output are."""

from __future__ import annotations

from steploop.checks import checked_int
from steploop.workload.arrivals import Arrivals
from steploop.workload.bursts import MarkovModulated
from steploop.workload.columns import FloatArray, Workload
from steploop.workload.lengths import Lengths
from steploop.workload.streams import Stream


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
    arrival_times, burst_share = _draw_times(arrivals, seed, count)
    return Workload(
        seed=seed,
        arrival_times=arrival_times,
        burst_share=burst_share,
        num_prompt_tokens=lengths[0].draw(Stream.PROMPT_LENGTHS.generator(seed), count),
        num_output_tokens=lengths[1].draw(Stream.OUTPUT_LENGTHS.generator(seed), count),
    )


def _draw_times(arrivals: Arrivals, seed: int, count: int) -> tuple[FloatArray, float | None]:
    """The times, and which share of them is in bursts."""
    generator = Stream.ARRIVALS.generator(seed)
    if isinstance(arrivals, MarkovModulated):
        times, in_burst = arrivals.draw_with_states(generator, count)
        return times, float(in_burst.mean())
    return arrivals.draw(generator, count), None
