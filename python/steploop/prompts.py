"""Prompts: the forms in which they may be given, and how each becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from steploop.errors import InvalidRequestError
from steploop.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt_token_ids": [...], "prompt": "the text they stand for, optional"}."""


def parse_prompt(
    prompt: Prompt, *, tokenizer: Tokenizer | None, vocab_size: int, model: object
) -> tuple[str | None, list[int]]:
    """(text or None, token ids), both checked.

    Raises:
        InvalidRequestError: an empty or ill-typed prompt, token ids outside the vocabulary, or a text where `model` has
            no tokenizer.
    """
    text: Any = None
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise InvalidRequestError(
                f"a prompt's keys must be prompt_token_ids or prompt, got {sorted(map(str, prompt))}"
            )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, token_ids = prompt, None
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"a prompt's text must be a string, got {text!r}")
    if token_ids is None:
        token_ids = _encode(text, tokenizer, model)
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise InvalidRequestError(f"a prompt must be a string or a list of token ids, got {token_ids!r}")
    if not token_ids:
        raise InvalidRequestError("the prompt must have at least one token, got none")
    return text, [_checked_token(token_id, vocab_size) for token_id in token_ids]


def _encode(text: str | None, tokenizer: Tokenizer | None, model: object) -> list[int]:
    if text is None:
        raise InvalidRequestError("a prompt must have a text or token ids, got neither")
    if tokenizer is None:
        raise InvalidRequestError(f"{model} has no tokenizer: give token ids, or set EngineConfig.tokenizer")
    return tokenizer.encode(text)


def _checked_token(token_id: object, vocab_size: int) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, Integral):
        raise InvalidRequestError(f"token ids must be integers, got {token_id!r}")
    number = int(token_id)
    if not 0 <= number < vocab_size:
        raise InvalidRequestError(f"token ids must be in 0..{vocab_size - 1}, got {number}")
    return number
