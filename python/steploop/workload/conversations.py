"""Conversations: requests whose prompts share a system prompt and repeat what was said before."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from steploop.checks import check_choice, check_positive, checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.columns import FloatArray, Int64Array, Segments, as_int32
from steploop.workload.lengths import Fixed, Lengths
from steploop.workload.ranks import Ranks
from steploop.workload.streams import Stream

THINK_TIME_KINDS = ("exponential", "fixed")

_MAX_TURNS = 2 * 10**7
"""Drawn at once, with those that are too long and come to nothing."""


@dataclass(frozen=True)
class ThinkTime:
    """From the arrival of a turn to that of the next: the loop is open, so that the time of the answer is part of it,
    however long the answer takes."""

    mean: float = 10.0
    """Seconds."""
    kind: str = "exponential"

    def __post_init__(self) -> None:
        check_positive("the think time", self.mean)
        check_choice("the think time", self.kind, THINK_TIME_KINDS)

    def draw(self, generator: np.random.Generator, count: int) -> FloatArray:
        """`count` times; of the same generator state, the first so many of a longer draw."""
        if self.kind == "fixed":
            return np.full(count, self.mean)
        return generator.standard_exponential(count) * self.mean


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The requests of a conversation are its turns. The prompt of each is the system prompt, all earlier turns' parts
    and answers, and a part of its own.

    What is drawn as prompt lengths are the turns' own parts, and what is drawn as arrivals are those of the first
    turns. Conversations are drawn until they have as many turns as there are requests; the last may be cut. All are
    whole otherwise, so that arrivals thin out in the end, when only begun conversations go on.
    """

    turns: Lengths = field(default_factory=lambda: Fixed(1))
    think_time: ThinkTime = field(default_factory=ThinkTime)
    num_system_tokens: int = 0
    """Of the system prompt; 0: there is none."""
    groups: Ranks = field(default_factory=lambda: Ranks(1))
    """Conversations of a group have the same system prompt."""
    max_tokens: int | None = None
    """A conversation ends before the turn whose prompt and output would together have more."""

    def __post_init__(self) -> None:
        checked_int("the tokens of the system prompt", self.num_system_tokens, low=0)
        if self.max_tokens is not None:
            checked_int("the most tokens of a conversation", self.max_tokens, low=1)


@dataclass(frozen=True)
class Turns:
    """Turns in the order of their conversations; each array has an entry for each."""

    conversations: Int64Array
    """The conversation's number, from 0, each at least once."""
    offsets: FloatArray
    """Seconds from the conversation's arrival."""
    num_history_tokens: Int64Array
    """What was said, the turn's own part with it, without the system prompt."""
    num_output_tokens: Int64Array

    @property
    def num_conversations(self) -> int:
        """How many there are."""
        return int(self.conversations[-1]) + 1


def draw_turns(conversations: Conversations, lengths: tuple[Lengths, Lengths], seed: int, count: int) -> Turns:
    """`count` turns.

    Raises:
        InvalidArgumentError: a first turn is too long for `max_tokens`, or there are absurdly many.
    """
    # Enough, since each conversation has a turn. How many of them are drawn makes no difference to any of them.
    turns = conversations.turns.draw(Stream.TURNS.generator(seed), count)
    most = count
    if conversations.max_tokens is not None:
        most = max(1, min(count, conversations.max_tokens // 2))  # a turn has two tokens at least
    turns = np.minimum(turns, most)
    ends = np.cumsum(turns)
    num_conversations = int(np.searchsorted(ends, count)) + 1
    while True:
        num_turns = int(ends[num_conversations - 1])
        if conversations.max_tokens is None:
            num_turns = count
        if num_turns > max(count, _MAX_TURNS):
            raise InvalidArgumentError(
                f"conversations must have fewer turns, since most are past max_tokens: {num_turns} for {count} requests"
            )
        drawn, fits = _draw_all(conversations, lengths, seed, turns[:num_conversations], num_turns)
        fitting = np.flatnonzero(fits)[:count]
        if len(fitting) == count:
            break
        num_conversations = min(count, 2 * num_conversations)
    return Turns(
        drawn.conversations[fitting],
        drawn.offsets[fitting],
        drawn.num_history_tokens[fitting],
        drawn.num_output_tokens[fitting],
    )


def _draw_all(
    conversations: Conversations, lengths: tuple[Lengths, Lengths], seed: int, turns: Int64Array, count: int
) -> tuple[Turns, npt.NDArray[np.bool_]]:
    """The first `count` turns of conversations of so many, and which of them are short enough."""
    numbers = np.repeat(np.arange(len(turns)), turns)[:count]
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    begins = first[numbers]  # for each turn, the first of its conversation
    parts = lengths[0].draw(Stream.PROMPT_LENGTHS.generator(seed), count)
    outputs = lengths[1].draw(Stream.OUTPUT_LENGTHS.generator(seed), count)
    said = np.cumsum(parts + outputs)
    said -= (said - parts - outputs)[begins]
    # That of a first turn is left out with all before it.
    times = np.cumsum(conversations.think_time.draw(Stream.THINK_TIMES.generator(seed), count))
    times -= times[begins]
    fits = np.ones(count, dtype=np.bool_)
    if conversations.max_tokens is not None:
        num_tokens = said + conversations.num_system_tokens
        fits = num_tokens <= conversations.max_tokens
        if not fits[first].all():
            raise InvalidArgumentError(
                f"the first turn of a conversation and its answer must have at most {conversations.max_tokens} tokens, "
                f"got {num_tokens[first].max()}; give the lengths a cap"
            )
    return Turns(numbers, times, said - outputs, outputs), fits


def shared_segments(conversations: Conversations, seed: int, numbers: Int64Array, history: Int64Array) -> Segments:
    """What prompts consist of, for each request's conversation and the tokens of its history.

    Contents are numbered from 0: first a system prompt for each group, if there is one, then each conversation.
    """
    num_system_tokens = conversations.num_system_tokens
    if not num_system_tokens:
        return Segments(np.arange(len(numbers) + 1), numbers, as_int32("lengths of segments", history))
    num_conversations = int(numbers.max()) + 1
    groups = conversations.groups.draw(Stream.PREFIX_GROUPS.generator(seed), num_conversations)
    contents = np.column_stack((groups[numbers], conversations.groups.count + numbers))
    lengths = np.column_stack((np.full(len(numbers), num_system_tokens), history))
    offsets = np.arange(len(numbers) + 1) * 2
    return Segments(offsets, contents.ravel(), as_int32("lengths of segments", lengths.ravel()))
