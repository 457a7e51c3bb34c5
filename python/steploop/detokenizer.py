"""Detokenizer: turns a growing list of token ids into text, piece by piece, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"

# Prompt tokens to decode together with the first new ones. A character has at most 4 bytes, so among 4 neighbouring
# sizes one starts the window at the start of a character.
_CONTEXT_TOKENS = range(5, 9)
# A character cannot be spread over more tokens than this; a longer run of replacements is junk, or real ones.
_MAX_PENDING_TOKENS = 8
_MAX_WINDOW_TOKENS = 32


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `token_ids`."""
        ...


class Detokenizer:
    """Text of one request's new tokens.

    Tokens cannot be decoded one by one: a character may be spread over several (bytes), and a token may look
    different after another (a leading space). So a window of the last tokens is decoded with and without the new
    ones, and the difference is the new text; it is held back while it ends in the middle of a character. The window
    moves on with each piece of text, so a token costs the same however long the text is.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        for size in _CONTEXT_TOKENS:
            self._window = list(prompt_token_ids[-size:])
            self._decoded_text = self._decode(self._window)
            if not self._decoded_text.startswith(_REPLACEMENT):
                break
        if self._decoded_text.endswith(_REPLACEMENT):
            before = self._text_before_last_character()
            if not self._decoded_text.startswith(before):
                # Some decoders turn every byte before an unfinished character into a replacement.
                self._decoded_text = before + _REPLACEMENT
        self._num_decoded = len(self._window)  # tokens of the window whose text has been given out

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; empty while they end in the middle of a character."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            if text.endswith(_REPLACEMENT):
                if len(self._window) - self._num_decoded <= _MAX_PENDING_TOKENS:
                    continue
                pieces.append(self._advance_within(text))
            else:
                pieces.append(self._advance(text))
        return "".join(pieces)

    def flush(self) -> str:
        """The text still held back, once no more tokens come: replacement characters for an unfinished character."""
        text = self._decode(self._window[self._num_decoded :])
        self._decoded_text = self._decode(self._window)
        self._num_decoded = len(self._window)
        return text

    def _text_before_last_character(self) -> str:
        """The text of the window less the tokens that make its end a replacement."""
        for end in range(len(self._window) - 1, 0, -1):
            text = self._decode(self._window[:end])
            if not text.endswith(_REPLACEMENT):
                return text
        return ""

    def _advance(self, text: str) -> str:
        """Gives out all of the window's text and lets its next start be the tokens just added."""
        new_text = self._new_text(text)
        added = self._window[self._num_decoded :]
        if not new_text:
            # Special tokens that are skipped: what comes next must still see the text before them, but the window must
            # not grow by them without end.
            if len(added) > _MAX_PENDING_TOKENS:
                del self._window[self._num_decoded :]
            return ""
        added_text = self._decode(added)
        if not added_text.startswith(_REPLACEMENT) or len(self._window) > _MAX_WINDOW_TOKENS:
            self._window, self._decoded_text = added, added_text
        else:  # they begin in the middle of a character, where no window may start
            self._decoded_text = text
        self._num_decoded = len(self._window)
        return new_text

    def _advance_within(self, text: str) -> str:
        """Gives out as much of a long run of replacement characters as later tokens cannot change."""
        for num_kept in range(1, _MAX_PENDING_TOKENS):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text + self._decode(tail) == text:
                new_text = self._new_text(head_text)
                self._window, self._num_decoded, self._decoded_text = tail, 0, ""
                return new_text
        return ""

    def _new_text(self, text: str) -> str:
        # Not simply what follows the decoded text: where the prompt ends in the middle of a character, that text ends
        # with a replacement, which the first new tokens turn into the character. (Or into itself, if it is one.)
        return text[_common_length(text, self._decoded_text) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, **self._options)


def _common_length(first: str, second: str) -> int:
    """Number of leading characters in which both agree."""
    if first.startswith(second):
        return len(second)
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
