"""What the engine returns: RequestOutput and its parts.

A step makes them anew for each request; frozen, they would take twice the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability under the model, before temperature, top_k and top_p."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None where it was not counted: on a GPU, with `logprobs=0`."""
    decoded_token: str | None
    """The token's own text; None without a tokenizer."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence so far."""

    index: int
    """Its number within the request, 0 to n - 1."""
    text: str
    """All text so far; empty with `detokenize=False`."""
    token_ids: list[int]
    """All new tokens so far, special ones too."""
    cumulative_logprob: float | None
    """Sum of the chosen tokens' log-probabilities; None unless `logprobs` was set."""
    logprobs: list[dict[int, Logprob]] | None
    """Per new token: the chosen token and the most likely ones, by id; None unless `logprobs` was set."""
    finish_reason: str | None = None
    """None while it runs; "stop" (end of sequence, a stop token or a stop string), "length", "abort", "timeout" (its
    `deadline_ms` has passed; it has the tokens it got so far) or "error"."""
    stop_reason: int | str | None = None
    """The one of `stop_token_ids` or `stop` that ended it; None otherwise."""

    @property
    def finished(self) -> bool:
        """No more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the clock of `time.monotonic()`; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    """How often it lost its KV blocks and had to recompute them or fetch them from the swap space."""
    num_generation_tokens: int = 0
    """Of all its samples."""
    time_per_output_token: float | None = None
    """Mean seconds between a sample's tokens after its first (TPOT), over all samples; None before the second."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step it took part in."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return _difference(self.first_token_time, self.arrival_time)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's state after a step in which it got tokens or ended."""

    request_id: str
    prompt: str | None
    """The prompt's text, of a conversation what the chat template made of it; None where only token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Per token of the prompt: itself and the most likely ones in its place, by id; None for the first, which comes
    after nothing. None unless `prompt_logprobs` was set, and before the first new token."""
    outputs: list[CompletionOutput]
    """One for each of `SamplingParams.n`, by index."""
    finished: bool
    """All of `outputs` are finished."""
    num_cached_tokens: int = field(compare=False)
    """Tokens of the prompt whose keys and values the prefix cache had when the request started."""
    metrics: RequestMetrics = field(compare=False)


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier
