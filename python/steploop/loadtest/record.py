"""RequestRecord: what happened to one request, and the latencies that follow from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple


class Arrival(NamedTuple):
    """Output that came at one moment."""

    time: float
    amount: int
    """Tokens where the target says so; else chunks with text, of unknown numbers of tokens."""


class RequestFailure(Exception):
    """A request came to nothing. `kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass
class RequestRecord:
    """One request. Times are seconds on the clock of `time.monotonic()`; None: it did not come to that.

    Latencies are counted from when the request was due, whatever kept it from being sent then.
    """

    index: int
    due_time: float
    num_prompt_tokens_asked: int
    num_output_tokens_asked: int
    started_time: float | None = None
    """The client came to it; what passed since it was due is the client's own lateness."""
    sent_time: float | None = None
    """After any wait for the limit of concurrent requests."""
    end_time: float | None = None
    """The last of the answer, or the failure."""
    arrivals: list[Arrival] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    """As the target counts them at the end; None where it does not say."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that its prefix cache had; None where it does not say."""
    queue_time: float | None = None
    """Seconds in the engine's queue; None where only the server knows."""
    error: str | None = None
    """Kind of the failure."""
    error_detail: str = ""

    @property
    def state(self) -> str:
        """ "completed", "failed", "unfinished" (sent, and the run ended) or "not_sent"."""
        if self.error is not None:
            return "failed"
        if self.end_time is not None:
            return "completed"
        return "not_sent" if self.sent_time is None else "unfinished"

    @property
    def num_output_tokens_known(self) -> int:
        """Tokens of output; where the target does not count them, its chunks with text."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return sum(arrival.amount for arrival in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Time to the first output that has text."""
        return self.arrivals[0].time - self.due_time if self.arrivals else None

    @property
    def e2e(self) -> float | None:
        """Time to the end of the answer."""
        return None if self.end_time is None else self.end_time - self.due_time

    @property
    def tpot(self) -> float | None:
        """Mean time for each token that came after the first arrival; None if none did."""
        arrivals = self.token_arrivals()
        num_later = sum(arrival.amount for arrival in arrivals[1:])
        return (arrivals[-1].time - arrivals[0].time) / num_later if num_later else None

    def token_arrivals(self) -> list[Arrival]:
        """Arrivals in tokens.

        Where only the total is known, it is spread over the chunks as evenly as whole tokens allow; a chunk that gets
        none (there are more chunks than tokens) is left out.
        """
        num_chunks = sum(arrival.amount for arrival in self.arrivals)
        num_tokens = self.num_output_tokens_known
        if num_chunks == num_tokens:
            return self.arrivals
        spread = []
        chunks = tokens = 0
        for arrival in self.arrivals:
            chunks += arrival.amount
            until_now = -(-chunks * num_tokens // num_chunks)  # rounded up, so that the first has a token
            if until_now > tokens:
                spread.append(Arrival(arrival.time, until_now - tokens))
            tokens = until_now
        return spread

    def gaps(self) -> list[tuple[float, float, int]]:
        """(when it ended, its seconds, the tokens that came at its end) for the wait between any two arrivals that
        follow each other."""
        return [
            (after.time, after.time - before.time, after.amount)
            for before, after in itertools.pairwise(self.token_arrivals())
        ]

    @property
    def longest_gap(self) -> float | None:
        """What a reader waited at most in the middle of the answer; None if it came at once."""
        return max((seconds for _, seconds, _ in self.gaps()), default=None)
