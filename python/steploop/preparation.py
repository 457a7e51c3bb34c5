"""Preparation: makes a checked request of what a caller gives, before the engine knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steploop.errors import InvalidRequestError, RequestTooLongError
from steploop.grammar.compiler import GrammarCompiler
from steploop.prompts import Prompt, parse_prompt
from steploop.request_options import RequestOptions, check_request_id
from steploop.request_state import RequestState
from steploop.sampling_params import SamplingParams

if TYPE_CHECKING:
    from steploop.config import EngineConfig
    from steploop.grammar.mask import GrammarMask
    from steploop.tokenizer import Tokenizer


class Preparation:
    """What an engine's requests are made with.

    Args:
        sampling_defaults: Those of the model, by the names of SamplingParams.
        eos_token_ids: Tokens that end a text.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampling_defaults: dict[str, Any],
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: list[int],
    ) -> None:
        self._config = config
        self._sampling_defaults = sampling_defaults
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None and eos_token_ids:
            self._compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def prepare(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> RequestState:
        """Raises as `LLMEngine.add_request`, but for what depends on other requests."""
        check_request_id(request_id)
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        params = (sampling_params or SamplingParams()).with_defaults(self._sampling_defaults)
        self._check_params(params)
        text, token_ids = parse_prompt(
            prompt, tokenizer=self._tokenizer, vocab_size=self._vocab_size, model=self._config.model
        )
        token_ids = self._truncate(token_ids, params)
        if len(token_ids) >= self._max_model_len:
            raise RequestTooLongError(
                f"the prompt must have fewer than max_model_len={self._max_model_len} tokens, got {len(token_ids)}"
            )
        most = self._config.max_num_queued_tokens
        if most is not None and len(token_ids) > most:
            raise RequestTooLongError(
                f"the prompt must have at most max_num_queued_tokens={most} tokens, got {len(token_ids)}"
            )
        native_params = params.to_native(self._bad_words(params))
        grammar = self._make_grammar(params)
        return RequestState(request_id, text, token_ids, params, options, self._tokenizer, native_params, grammar)

    def close(self) -> None:
        """Ends what runs beside the engine. May be called again."""
        if self._compiler is not None:
            self._compiler.close()

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """As tokens."""
        words: list[list[int]] = []
        for text in params.bad_words:
            assert self._tokenizer is not None
            # In the middle of a text most words begin with a space, which makes them other tokens.
            for spelling in (text, " " + text.lstrip()):
                token_ids = self._tokenizer.encode_rendered(spelling)
                if token_ids and token_ids not in words:
                    words.append(token_ids)
        return words

    def _make_grammar(self, params: SamplingParams) -> GrammarMask | None:
        if params.structured_outputs is None:
            return None
        if self._compiler is None:
            raise InvalidRequestError(
                f"structured_outputs needs a tokenizer and an end-of-sequence token, and {self._config.model} lacks one"
            )
        compiled = self._compiler.compile(params.structured_outputs)
        from steploop.grammar.mask import GrammarMask

        return GrammarMask(compiled, num_samples=params.n, vocab_size=self._vocab_size)

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            assert params.max_tokens is not None
            most = max(1, self._max_model_len - params.max_tokens)
        return token_ids[-most:]

    def _check_params(self, params: SamplingParams) -> None:
        if params.n > self._config.max_num_seqs:
            raise InvalidRequestError(
                f"n must be <= max_num_seqs={self._config.max_num_seqs}, so that all samples fit a step, got {params.n}"
            )
        named = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "the tokens of logit_bias": params.logit_bias or (),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= self._vocab_size:
                    raise InvalidRequestError(f"{name} must be in 0..{self._vocab_size - 1}, got {token_id}")
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self._tokenizer is None:
                raise InvalidRequestError(f"{name} needs a tokenizer, and {self._config.model} has none")
