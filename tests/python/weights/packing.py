"""Small packed models, and files of them that are changed on purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steploop import _C
from steploop.weights import Checkpoint, GenerationDefaults, ModelSpec, save_packed
from steploop.weights.packed_file import PACKED_FILE_NAME, sealed
from steploop.weights.quantize import input_group

SMALL = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=50,  # not a multiple of the kernels' panel of 32
    hidden_size=96,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope_theta=10000.0,
)
KINDS = ("qkv", "o", "gate_up", "down", "lm_head")
Header = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class NoTensors(Checkpoint):
    """What a model was made from that a test made itself."""

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError


def values(shape: list[int], start: int) -> torch.Tensor:
    """Numbers that differ from their neighbours, the same everywhere and for ever."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * 37 + start) % 251).reshape(shape)


def make_model(spec: ModelSpec, dtype: str, quantization: str | None = None) -> tuple[Any, dict[str, Any]]:
    """A loaded model with every linear weight quantised, or none; and its options."""
    options = {} if quantization is None else {"linear_formats": dict.fromkeys(KINDS, quantization)}
    model = _C.Model(spec.to_native(**options), dtype=dtype)
    for index, (name, shape) in enumerate(model.expected_weights().items()):
        numbers = values(shape, index)
        if quantization is None or len(shape) == 1 or name in ("model.embed_tokens.weight", "lm_head.weight"):
            model.load_weight(name, (numbers - 125) / 64)
        elif quantization == "int8":
            scales = values([shape[0], -(-shape[1] // input_group(shape[1]))], index).float()
            model.load_quantized_weight(name, (numbers - 125).to(torch.int8), scales)
        else:
            groups = [shape[0], shape[1] // 32]
            parts = [(values(groups, index + shift) / 64).half() for shift in (0, 1)]
            model.load_quantized_weight(name, (numbers % 16).to(torch.uint8), *parts)
    model.finish_loading()
    return model, options


def pack(
    folder: Path, spec: ModelSpec = SMALL, dtype: str = "bfloat16", quantization: str | None = None
) -> tuple[Path, Any]:
    """A packed model without a tokenizer: its file, and the model."""
    model, options = make_model(spec, dtype, quantization)
    checkpoint = NoTensors(
        path=folder,
        spec=spec,
        dtype=dtype,
        generation=GenerationDefaults(eos_token_ids=(3, 5), sampling={"temperature": 0.5, "max_tokens": 7}),
        tokenizer=None,
    )
    size_bytes = save_packed(model, checkpoint, folder, options=options, quantization=quantization)
    path = folder / PACKED_FILE_NAME
    assert path.stat().st_size == size_bytes
    return path, model


def contents(model: Any) -> dict[str, bytes]:
    return {name: bytes(array) for name, array in model.packed_arrays().items()}


def split(data: bytes) -> tuple[Header, bytes]:
    """Header and arrays of a file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def change_header(path: Path, change: Callable[[Header], object]) -> None:
    """Changes a file's header and gives it the checksum that it then has to have."""
    header, arrays = split(path.read_bytes())
    change(header)
    if isinstance(header.get("__metadata__"), dict) and "checksum" in header["__metadata__"]:
        header["__metadata__"]["checksum"] = "0" * 64
    path.write_bytes(sealed(json.dumps(header).encode()) + arrays)


def change_content(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The same for the JSON object beside the arrays."""

    def in_header(header: Header) -> None:
        content = json.loads(header["__metadata__"]["content"])
        change(content)
        header["__metadata__"]["content"] = json.dumps(content)

    change_header(path, in_header)


def digest(model: Any) -> str:
    """Of all that a packed file would hold."""
    checksum = hashlib.sha256()
    for name, data in contents(model).items():
        checksum.update(name.encode() + data)
    return checksum.hexdigest()[:16]
