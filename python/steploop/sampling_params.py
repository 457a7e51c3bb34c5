"""SamplingParams: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from steploop.checks import INT32_MAX, check_bool, checked_int
from steploop.errors import InvalidRequestError

if TYPE_CHECKING:
    from steploop import _C

MAX_LOGPROBS = 20

_checked_int = partial(checked_int, error=InvalidRequestError)

# What a field falls back to where neither the caller nor the model's generation config sets it.
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, named as in vLLM. Checked when made.

    `None` for `temperature`, `top_p`, `top_k` and `max_tokens` means "not set": the model's `generation_config.json`
    decides, and where it is silent 1.0, 1.0, 0 (all tokens) and 16.

    Raises:
        InvalidRequestError: a value out of its range, or of the wrong type.
    """

    temperature: float | None = None
    """0 picks the most likely token (greedy); otherwise logits are divided by it. >= 0."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities sum to this. In (0, 1]."""
    top_k: int | None = None
    """Sample from this many most likely tokens; 0 or -1 for all."""
    seed: int | None = None
    """Makes this request's draws repeatable; without one the engine derives one from its own seed."""
    max_tokens: int | None = None
    """At most this many new tokens. >= 1."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many new tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end the request, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Return log-probabilities of the chosen token and of this many most likely ones; 0 to 20."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in `token_ids`)."""
    detokenize: bool = True
    """Make text; without it `text` stays empty."""
    n: int = 1
    """How many answers to draw for the prompt, each with draws of its own; they share the prompt's KV cache. >= 1."""

    def __post_init__(self) -> None:
        self._integer("n", low=1, optional=False)
        temperature = self._number("temperature")
        if temperature is not None and temperature < 0:
            raise InvalidRequestError(f"temperature must be >= 0, got {temperature}")
        top_p = self._number("top_p")
        if top_p is not None and not 0 < top_p <= 1:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {top_p}")
        self._integer("top_k", low=-1)
        self._integer("seed", low=0, high=2**64 - 1)
        self._integer("max_tokens", low=1)
        self._integer("min_tokens", low=0, optional=False)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be <= max_tokens, got min_tokens {self.min_tokens} and max_tokens {self.max_tokens}"
            )
        self._integer("logprobs", low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            check_bool(name, getattr(self, name), error=InvalidRequestError)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        # A copy, so that a list the caller changes later changes nothing here.
        stop_token_ids = [_checked_int("each of stop_token_ids", token, low=0) for token in self.stop_token_ids]
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    def _number(self, name: str) -> float | None:
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequestError(f"{name} must be a number, got {value!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InvalidRequestError(f"{name} must be finite, got {value}")
        object.__setattr__(self, name, number)
        return number

    def _integer(self, name: str, *, low: int, high: int = INT32_MAX, optional: bool = True) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            object.__setattr__(self, name, _checked_int(name, value, low=low, high=high))

    def with_defaults(self, model_defaults: dict[str, Any]) -> SamplingParams:
        """A copy in which every unset field has its value: the model's, else steploop's."""
        unset = {name: value for name, value in DEFAULTS.items() if getattr(self, name) is None}
        values = {name: model_defaults.get(name, value) for name, value in unset.items()}
        if "max_tokens" in values:
            # The default must not contradict a min_tokens that was set.
            values["max_tokens"] = max(values["max_tokens"], self.min_tokens)
        return replace(self, **values)

    def to_native(self) -> _C.SamplingParams:
        """The native counterpart; every field must be set (`with_defaults`)."""
        from steploop import _C

        assert self.temperature is not None and self.top_p is not None
        assert self.top_k is not None and self.max_tokens is not None
        return _C.SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )
