"""GrammarMask: the tokens that may come next in each sample of a request, by its grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from steploop import _C

_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.01
"""Of processor time, for a request and for each of its tokens: everybody waits meanwhile. Who takes more must end."""


class GrammarMask:
    """Follows the samples of one request.

    Args:
        compiled: What `GrammarCompiler.compile` made.
    """

    def __init__(self, compiled: Any, *, num_samples: int, vocab_size: int) -> None:
        import xgrammar

        self.bitmask = _C.TokenBitmask(num_rows=num_samples, vocab_size=vocab_size)
        """What the engine reads; as of the tokens accepted so far."""
        self._seconds_left = _SECONDS
        self._words = np.asarray(self.bitmask)
        self._matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(num_samples)]
        for index, matcher in enumerate(self._matchers):
            matcher.fill_next_token_bitmask(self._words, index)

    def accept(self, index: int, token_ids: Sequence[int]) -> None:
        """A sample goes on with these tokens.

        Raises:
            ValueError: the grammar has no such continuation, or it takes too long.
        """
        began = time.thread_time()
        matcher = self._matchers[index]
        for token_id in token_ids:
            if not matcher.accept_token(token_id):
                raise ValueError(f"token {token_id} does not follow the grammar")
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self._words, index)
        self._seconds_left += _SECONDS_PER_TOKEN * len(token_ids) - (time.thread_time() - began)
        if self._seconds_left < 0:
            raise ValueError("the grammar takes too long")
