"""Draws a workload: when each request arrives, how long its prompt and its output are, and what prompts share."""

from __future__ import annotations

import dataclasses

import numpy as np

from steploop.checks import checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.arrivals import Arrivals
from steploop.workload.bursts import MarkovModulated
from steploop.workload.columns import FloatArray, Int32Array, Segments, Workload, as_int32
from steploop.workload.conversations import Conversations, draw_turns, shared_segments
from steploop.workload.lengths import Fixed, Lengths
from steploop.workload.ranks import Ranks
from steploop.workload.streams import Stream


def draw_workload(
    num_requests: int,
    *,
    lengths: tuple[Lengths, Lengths],
    arrivals: Arrivals,
    seed: int = 0,
    conversations: Conversations | None = None,
    recorded_segments: Segments | None = None,
    tenants: Ranks | None = None,
    priorities: Ranks | None = None,
) -> Workload:
    """The same for the same arguments (and the same numpy: its streams may change between versions).

    Args:
        lengths: Of prompts and of outputs.
        seed: >= 0.
        conversations: What prompts share; None: nothing.
        recorded_segments: The same, recorded with the lengths.
        tenants: Whose requests they are; all of a conversation are the same one's.
        priorities: Likewise.

    Raises:
        InvalidArgumentError: a number out of range, more requests than were recorded, or conversations of recorded
            segments.
    """
    count = checked_int("num_requests", num_requests, low=1)
    seed = checked_int("seed", seed, low=0, high=2**64 - 1)
    if conversations is None:
        workload = _draw_requests(count, lengths, arrivals, seed)
        if recorded_segments is not None:
            workload = dataclasses.replace(workload, segments=recorded_segments.first(count))
    elif recorded_segments is not None:
        raise InvalidArgumentError("recorded prompts have their shared prefixes: there is nothing to draw")
    else:
        workload = _draw_conversations(count, lengths, arrivals, seed, conversations)
    # One for each conversation, or each request where there are none.
    groups = np.arange(count) if workload.conversations is None else workload.conversations
    num_groups = int(groups.max()) + 1

    def labels(ranks: Ranks | None, stream: Stream) -> Int32Array | None:
        if ranks is None:
            return None
        return as_int32("a label", ranks.draw(stream.generator(seed), num_groups)[groups])

    return dataclasses.replace(
        workload, tenants=labels(tenants, Stream.TENANTS), priorities=labels(priorities, Stream.PRIORITIES)
    )


def _draw_requests(count: int, lengths: tuple[Lengths, Lengths], arrivals: Arrivals, seed: int) -> Workload:
    """Each for itself."""
    prompts = lengths[0].draw(Stream.PROMPT_LENGTHS.generator(seed), count)
    outputs = lengths[1].draw(Stream.OUTPUT_LENGTHS.generator(seed), count)
    times, burst_share = _draw_times(arrivals, seed, count)
    return Workload(
        seed=seed,
        arrival_times=times,
        num_prompt_tokens=as_int32("num_prompt_tokens", prompts),
        num_output_tokens=as_int32("num_output_tokens", outputs),
        burst_share=burst_share,
    )


def _draw_conversations(
    count: int, lengths: tuple[Lengths, Lengths], arrivals: Arrivals, seed: int, conversations: Conversations
) -> Workload:
    turns = draw_turns(conversations, lengths, seed, count)
    begins, burst_share = _draw_times(arrivals, seed, turns.num_conversations)
    times = begins[turns.conversations] + turns.offsets
    order = np.argsort(times, kind="stable")  # turns of a conversation stay in their order
    numbers, history = turns.conversations[order], turns.num_history_tokens[order]
    return Workload(
        seed=seed,
        arrival_times=times[order],
        num_prompt_tokens=as_int32("num_prompt_tokens", history + conversations.num_system_tokens),
        num_output_tokens=as_int32("num_output_tokens", turns.num_output_tokens[order]),
        segments=shared_segments(conversations, seed, numbers, history),
        conversations=None if conversations.turns == Fixed(1) else numbers,
        burst_share=burst_share,
    )


def _draw_times(arrivals: Arrivals, seed: int, count: int) -> tuple[FloatArray, float | None]:
    """The times, and which share of them is in bursts."""
    generator = Stream.ARRIVALS.generator(seed)
    if isinstance(arrivals, MarkovModulated):
        times, in_burst = arrivals.draw_with_states(generator, count)
        return times, float(in_burst.mean())
    return arrivals.draw(generator, count), None
