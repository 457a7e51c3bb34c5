"""Checkpoint: what every kind of model file offers the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steploop.errors import ModelLoadError
from steploop.memory import format_bytes, total_memory_bytes

if TYPE_CHECKING:
    import torch

    from steploop.weights.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Where a tokenizer lies: a folder, or the GGUF file that carries it."""

    path: str
    gguf_file: str | None = None
    """Name of the GGUF file inside `path`."""


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What the model's authors say about generating with it."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    """Defaults for fields of SamplingParams."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(ABC):
    """An opened and checked model; no weight has been read yet."""

    path: Path
    spec: ModelSpec
    dtype: str
    """What dtype="auto" means for it: "float32" or "bfloat16"."""
    generation: GenerationDefaults
    tokenizer: TokenizerFiles | None
    """None: the files hold no tokenizer."""

    def check_memory(self, weight_bytes: int, dtype: str) -> None:
        """Raises ModelLoadError if this machine has less memory than the weights take."""
        there = total_memory_bytes()
        if weight_bytes > there:
            raise ModelLoadError(
                f"{self.path} describes a model of {format_bytes(weight_bytes)} in {dtype}; "
                f"this machine has {format_bytes(there)} of memory"
            )

    @abstractmethod
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight once, under its Hugging Face name, shaped [out_features, in_features] or [size].

        A tensor is valid until the next one is asked for. `dtype` is what the caller computes in: a reader that has
        to convert anyway converts to it.

        Raises:
            ModelLoadError: the file does not hold what its header says.
        """

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names that `tensors` gives, and the shape of each. Nothing is read."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One of `tensors`, the caller's own."""

    def stores_int4(self, name: str) -> bool:
        """Whether `int4_codes` has this weight."""
        return False

    def int4_codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A weight in the format of `quantize.quantize_int4`, where the file has it in just that."""
        raise NotImplementedError
