"""Opens a GGUF file and dequantises its tensors, a few rows at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steploop.errors import ModelLoadError, UnsupportedModelError
from steploop.weights.checkpoint import Checkpoint, TokenizerFiles
from steploop.weights.generation import parse_generation_config
from steploop.weights.gguf_config import ROPE_FACTORS, hf_name, parse_gguf_config
from steploop.weights.gguf_header import GgufHeader, GgufTensor, read_gguf_header

if TYPE_CHECKING:
    import torch

# Dequantised at a time: enough to spread numpy's overhead, little enough to stay in cache.
_CHUNK_ELEMENTS = 2**17
# Instruction-tuned models end a turn with one of the latter two and a document with the first.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# generation_config.json's name -> GGUF's
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, kw_only=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file."""

    header: GgufHeader

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        with _Mapping(self.path) as mapping:
            for name, tensor in self._tensors.items():
                yield name, self._in_order(name, mapping.dequantise(tensor, dtype))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        with _Mapping(self.path) as mapping:
            return self._in_order(name, mapping.dequantise(self._tensors[name], dtype))

    def stores_int4(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name].kind.name in ("Q4_0", "Q4_1")

    def int4_codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with _Mapping(self.path) as mapping:
            codes, scales, minimums = mapping.int4_codes(self._tensors[name])
        return self._in_order(name, codes), self._in_order(name, scales), self._in_order(name, minimums)

    @cached_property
    def _tensors(self) -> dict[str, GgufTensor]:
        """By their Hugging Face names."""
        return {hf_name(name): tensor for name, tensor in self.header.tensors.items() if name != ROPE_FACTORS}

    def _in_order(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Rows as Hugging Face has them."""
        if self.header.metadata["general.architecture"] != "llama":
            return weight
        heads = {"q_proj": self.spec.num_heads, "k_proj": self.spec.num_kv_heads}
        num_heads = heads.get(name.rpartition(".")[0].rpartition(".")[2], 0)
        # Of another size it does not fit the model, which the loader reports along with all else.
        return unpermute(weight, num_heads) if weight.shape[0] == num_heads * self.spec.head_dim else weight


def open_gguf(path: Path) -> GgufCheckpoint:
    """Reads and checks the header.

    Raises:
        ModelLoadError: the file is damaged, or not GGUF.
        UnsupportedModelError: the model needs something the engine lacks.
    """
    import torch

    header = read_gguf_header(path)
    rope_factors = None
    if ROPE_FACTORS in header.tensors:
        with _Mapping(path) as mapping:
            rope_factors = mapping.dequantise(header.tensors[ROPE_FACTORS], torch.float32).flatten().tolist()
    try:
        spec = parse_gguf_config(header, rope_factors)
        eos = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
        generation_config = {name: header.metadata.get(key) for name, key in _SAMPLING_KEYS.items()}
        generation_config["eos_token_id"] = [token for token in eos if token is not None]
        generation = parse_generation_config(generation_config, {}, spec.vocab_size)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None
    has_tokenizer = "tokenizer.ggml.model" in header.metadata
    return GgufCheckpoint(
        path=path,
        spec=spec,
        dtype="bfloat16",
        generation=generation,
        tokenizer=TokenizerFiles(path=str(path.parent), gguf_file=path.name) if has_tokenizer else None,
        header=header,
    )


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes GGUF's order of the query and key rows of a llama model.

    GGUF stores the two halves of each head interleaved (row 2i of a head beside row 2i+1 is a rotary pair), Hugging
    Face stores them one after the other. `weight` is [num_heads * head_dim, ...]; so is the result.
    """
    paired = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


class _Mapping:
    """A memory-mapped file whose pages are given back as soon as they have been read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Mapping:
        try:
            with self._path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self._path} cannot be read: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def dequantise(self, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`; one-dimensional ones (norms, biases) stay float32, they are small."""
        import torch

        self._check_length(tensor)
        result = torch.empty(tensor.shape, dtype=torch.float32 if len(tensor.shape) == 1 else dtype)
        rows = result.view(tensor.num_rows, -1)
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
        for first in range(0, tensor.num_rows, rows_per_chunk):
            last = min(first + rows_per_chunk, tensor.num_rows)
            rows[first:last] = torch.from_numpy(self._rows(tensor, first, last))
            if hasattr(mmap, "MADV_DONTNEED"):
                # All of them: a page fault also maps pages around it, those given back before among them.
                self._data.madvise(mmap.MADV_DONTNEED)
        return result

    def int4_codes(self, tensor: GgufTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The codes, scales and minimums of a tensor of type Q4_0 or Q4_1 [rows, columns]; see `quantize_int4`.

        A block of 32 is a float16 scale, of Q4_1 a float16 minimum, and 16 bytes: codes i and 16 + i are the low and
        the high half of byte i. Q4_0 stands for scale * (code - 8).
        """
        import torch

        self._check_length(tensor)
        has_minimum = tensor.kind.name == "Q4_1"
        blocks = self._raw(tensor, 0, tensor.num_rows).reshape(-1, 20 if has_minimum else 18)
        scales = blocks[:, 0:2].copy().view(np.float16)
        minimums = blocks[:, 2:4].copy().view(np.float16) if has_minimum else scales * np.float16(-8)
        packed = blocks[:, -16:]
        codes = np.concatenate((packed & 15, packed >> 4), axis=1)
        shape = (tensor.num_rows, tensor.shape[-1] // 32)
        return (
            torch.from_numpy(codes.reshape(tensor.shape)),
            torch.from_numpy(scales.reshape(shape)),
            torch.from_numpy(minimums.reshape(shape)),
        )

    def _check_length(self, tensor: GgufTensor) -> None:
        if len(self._data) < tensor.offset + tensor.num_rows * tensor.row_size_bytes:
            raise ModelLoadError(f"{self._path} has become shorter since it was opened")

    def _raw(self, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
        """The bytes of rows first..last; copied, so that no view keeps the mapping alive."""
        start = tensor.offset + first * tensor.row_size_bytes
        size_bytes = (last - first) * tensor.row_size_bytes
        return np.array(np.frombuffer(self._data, dtype=np.uint8, count=size_bytes, offset=start))

    def _rows(self, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
        """Rows first..last as float32, [last - first, row length]."""
        from gguf.quants import dequantize

        raw = self._raw(tensor, first, last)
        try:
            # As one long row, which is the same blocks: the gguf package loops over groups of 16 rows.
            values = dequantize(raw.reshape(1, -1), tensor.kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"tensor {tensor.name} has GGUF type {tensor.kind.name}, which cannot be dequantised"
            ) from None
        return values.reshape(last - first, tensor.shape[-1])
