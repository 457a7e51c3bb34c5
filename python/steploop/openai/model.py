"""ServedModel: an engine under the name that requests know it by."""

from __future__ import annotations

from dataclasses import dataclass

from steploop.engine import LLMEngine
from steploop.errors import InvalidRequestError
from steploop.openai.errors import ApiError
from steploop.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """What requests are read with."""

    engine: LLMEngine
    name: str
    max_choices: int
    """Most answers to one request of OpenAI's API: its prompts times `n`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            InvalidRequestError: it has none.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(f"{self.name} has no tokenizer: give token ids")
        return tokenizer

    def check_name(self, name: str | None) -> None:
        """Whether a request is for this model. One that names none is.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.name:
            raise ApiError(404, f"model must be {self.name}, got {name}", param="model", code="model_not_found")

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Whether so many answers may be asked for.

        Raises:
            InvalidRequestError: they may not.
        """
        if num_prompts * n > self.max_choices:
            raise InvalidRequestError(
                f"n must be so small that prompts times n are at most {self.max_choices}, got {num_prompts} times {n}"
            )
