"""What prompts say: random token ids, or text of common words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steploop.checks import checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.streams import Stream

WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home big "
    "give air line set own under read last never us left end along while might next sound below saw something thought "
    "both few those always looked show large often together asked house world going want"
).split()


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of a workload of contents. Token p of a content depends on the seed, the run, the content's
    number and p, on nothing else: a short part of a content is the beginning of a long one.

    Args:
        seed: The workload's.
        run: Of several runs over the same workload, which: each gets other prompts, so that none finds its own in a
            prefix cache.
        vocab_size: For `token_ids`: they are drawn evenly from all of the vocabulary.
    """

    seed: int
    run: int = 0
    vocab_size: int | None = None

    def token_ids(self, content: int, length: int) -> list[int]:
        """The first `length` token ids of the content of this number.

        Raises:
            InvalidArgumentError: there is no vocab_size, or none that can be.
        """
        if self.vocab_size is None:
            raise InvalidArgumentError("prompts of token ids need the vocabulary's size")
        return self._numbers(content, length, checked_int("the vocabulary's size", self.vocab_size, low=1))

    def text(self, content: int, length: int) -> str:
        """The first `length` words of the content, each about a token to most tokenizers of English."""
        return " ".join(WORDS[number] for number in self._numbers(content, length, len(WORDS)))

    def token_ids_of(self, segments: Iterable[tuple[int, int]]) -> list[int]:
        """A prompt of parts, each a content and a length; see `Workload.prompt_segments`. Raises as token_ids."""
        return [token_id for content, length in segments for token_id in self.token_ids(content, length)]

    def text_of(self, segments: Iterable[tuple[int, int]]) -> str:
        """A prompt of parts, each a content and a length, in words."""
        return " ".join(self.text(content, length) for content, length in segments)

    def _numbers(self, content: int, count: int, end: int) -> list[int]:
        generator = Stream.CONTENTS.generator(self.seed, self.run, content)
        numbers: list[int] = generator.integers(end, size=count).tolist()
        return numbers
