"""What prompts say: random token ids, or text of common words."""

from __future__ import annotations

from dataclasses import dataclass

from steploop.checks import checked_int
from steploop.errors import InvalidArgumentError
from steploop.workload.draw import Stream

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
    """Makes the prompts of a workload. A prompt depends on the seed, the run and the request's number, on no other
    prompt.

    Args:
        seed: The workload's.
        run: Of several runs over the same workload, which: each gets other prompts, so that none finds its own in a
            prefix cache.
        vocab_size: For `token_ids`: they are drawn evenly from all of the vocabulary.
    """

    seed: int
    run: int = 0
    vocab_size: int | None = None

    def token_ids(self, index: int, length: int) -> list[int]:
        """`length` token ids for the request of this number.

        Raises:
            InvalidArgumentError: there is no vocab_size, or none that can be.
        """
        if self.vocab_size is None:
            raise InvalidArgumentError("prompts of token ids need the vocabulary's size")
        size = checked_int("the vocabulary's size", self.vocab_size, low=1)
        token_ids: list[int] = (
            Stream.CONTENTS.generator(self.seed, self.run, index).integers(size, size=length).tolist()
        )
        return token_ids

    def text(self, index: int, length: int) -> str:
        """`length` words, each about a token to most tokenizers of English."""
        return " ".join(WORDS[number] for number in self._numbers(index, length, len(WORDS)))

    def _numbers(self, index: int, count: int, end: int) -> list[int]:
        generator = Stream.CONTENTS.generator(self.seed, self.run, index)
        numbers: list[int] = generator.integers(end, size=count).tolist()
        return numbers
