"""SamplingParams: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from steploop.checks import INT32_MAX, as_finite, check_bool, checked_int, is_unicode
from steploop.errors import InvalidRequestError
from steploop.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from steploop import _C

MAX_LOGPROBS = 20

_checked_int = partial(checked_int, error=InvalidRequestError)

# What a field falls back to where neither the caller nor the model's generation config sets it.
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 16,
}

_MAX_LOGIT_BIAS = 100.0
_MAX_PENALTY = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, with vLLM's names and meanings. Checked when made.

    What they do to the logits of a token, in this order: `allowed_token_ids`, `structured_outputs`, `bad_words`,
    `min_tokens`, `logit_bias`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`; then, unless the most
    likely token is taken, `temperature`, `min_p`, `top_k`, `top_p`, and the draw.

    `None` for a field of `DEFAULTS` means "not set": the model's `generation_config.json` decides, and where it is
    silent `DEFAULTS`.

    Raises:
        InvalidRequestError: a value out of its range, or of the wrong type.
    """

    temperature: float | None = None
    """0 picks the most likely token (greedy); otherwise logits are divided by it. >= 0."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities sum to this. In (0, 1]."""
    top_k: int | None = None
    """Sample from this many most likely tokens; 0 or -1 for all."""
    min_p: float | None = None
    """Drop tokens whose probability is below this share of the likeliest token's. In [0, 1]; 0 drops none."""
    repetition_penalty: float | None = None
    """Divides the logit of each token that the prompt or the output has, or multiplies a negative one. > 0; 1 changes
    nothing, more makes repetition less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output has. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output has it. In [-2, 2]."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens; values are cut to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """No others may come. At least one."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not come: the last token of each is ruled out where its others came before it, with a space in
    front and without. Tokens that spell a text in another way are not found."""
    seed: int | None = None
    """Makes this request's draws repeatable; without one (or with -1) the engine derives one from its own seed."""
    max_tokens: int | None = None
    """At most this many new tokens. >= 1."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many new tokens, and no stop string in the text of them."""
    stop: str | list[str] | None = None
    """Texts that end the request; the output ends before the first of them to be complete. Needs `detokenize`."""
    include_stop_str_in_output: bool = False
    """Leave the text of `stop` that ended the request in the output."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end the request, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Return log-probabilities of the chosen token and of this many most likely ones; 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, each after those before it. The prompt is computed as a whole, whatever the
    prefix cache has of it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (they stay in `token_ids`)."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text, where the tokenizer is one of the slow ones that know this."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many of the prompt's last tokens; -1: as many as leave room for `max_tokens`. >= 1 otherwise."""
    detokenize: bool = True
    """Make text; without it `text` stays empty."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have: of the tokens, only those may come that lead to it. It ends with it, so this
    cannot go with `ignore_eos` and `min_tokens`."""
    n: int = 1
    """How many answers to draw for the prompt, each with draws of its own; they share the prompt's KV cache. >= 1."""

    def __post_init__(self) -> None:
        self._integer("n", low=1, optional=False)
        self._number("temperature", ">= 0", lambda value: value >= 0)
        self._number("top_p", "in (0, 1]", lambda value: 0 < value <= 1)
        self._number("min_p", "in [0, 1]", lambda value: 0 <= value <= 1)
        self._number("repetition_penalty", "> 0", lambda value: value > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, "in [-2, 2]", lambda value: abs(value) <= _MAX_PENALTY, optional=False)
        self._integer("top_k", low=-1)
        if self.seed == -1:
            self._set("seed", None)
        self._integer("seed", low=0, high=2**64 - 1)
        self._integer("max_tokens", low=1)
        self._integer("min_tokens", low=0, optional=False)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be <= max_tokens, got min_tokens {self.min_tokens} and max_tokens {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            self._integer(name, low=0, high=MAX_LOGPROBS)
        if self.truncate_prompt_tokens != -1:
            self._integer("truncate_prompt_tokens", low=1)
        for name in _FLAGS:
            check_bool(name, getattr(self, name), error=InvalidRequestError)
        # Copies, so that what the caller changes later changes nothing here.
        self._set("stop_token_ids", _checked_tokens("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _checked_tokens("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids must have a token or more, or be None for all, got []")
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", _checked_texts("bad_words", self.bad_words))
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self._set("stop", _checked_texts("stop", stop))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize=True: it is looked for in the text")
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, StructuredOutputsParams):
            raise InvalidRequestError(f"structured_outputs must be StructuredOutputsParams, got {form!r}")
        if self.ignore_eos or self.min_tokens > 0:
            raise InvalidRequestError(
                "structured_outputs needs ignore_eos=False and min_tokens=0: the form says the end"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, what_must_hold: str, holds: Callable[[float], bool], *, optional: bool = True) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequestError(f"{name} must be a number, got {value!r}")
        number = as_finite(value)
        if number is None:
            raise InvalidRequestError(f"{name} must be finite, got {value}")
        if not holds(number):
            raise InvalidRequestError(f"{name} must be {what_must_hold}, got {number}")
        self._set(name, number)

    def _integer(self, name: str, *, low: int, high: int = INT32_MAX, optional: bool = True) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            self._set(name, _checked_int(name, value, low=low, high=high))

    def with_defaults(self, model_defaults: dict[str, Any]) -> SamplingParams:
        """A copy in which every unset field has its value: the model's, else steploop's."""
        unset = {name: value for name, value in DEFAULTS.items() if getattr(self, name) is None}
        values = {name: model_defaults.get(name, value) for name, value in unset.items()}
        if "max_tokens" in values:
            # The default must not contradict a min_tokens that was set.
            values["max_tokens"] = max(values["max_tokens"], self.min_tokens)
        return replace(self, **values)

    def to_native(self, bad_words: list[list[int]]) -> _C.SamplingParams:
        """The native counterpart; every field must be set (`with_defaults`). `bad_words`: their tokens."""
        from steploop import _C

        return _C.SamplingParams(
            bad_words=bad_words,
            logit_bias=list((self.logit_bias or {}).items()),
            allowed_token_ids=self.allowed_token_ids or [],
            **{name: getattr(self, name) for name in _NATIVE},
        )


_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)
_NATIVE = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)
"""Fields that the native class has under the same names."""


def _checked_tokens(name: str, value: object) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {value!r}")
    return [_checked_int(f"each of {name}", token, low=0) for token in value]


def _checked_texts(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(f"{name} must be a list of strings, got {value!r}")
    if not all(text and is_unicode(text) for text in value):
        raise InvalidRequestError(f"each of {name} must be valid Unicode and not empty, got {list(value)!r}")
    return list(value)


def _checked_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias must be a dict of token ids and numbers, got {value!r}")
    checked = {}
    for token, bias in value.items():
        number = as_finite(bias)
        if number is None:
            raise InvalidRequestError(f"the values of logit_bias must be finite numbers, got {bias!r}")
        token_id = _checked_int("the tokens of logit_bias", token, low=0)
        checked[token_id] = min(max(number, -_MAX_LOGIT_BIAS), _MAX_LOGIT_BIAS)
    return checked
