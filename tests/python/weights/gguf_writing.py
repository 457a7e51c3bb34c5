"""Writes GGUF files for tests: with the gguf package where they are valid, byte by byte where they are not."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

METADATA: dict[str, Any] = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "block_count": 2,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
"""The shape of the tests' tiny Llama."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    stem, suffix = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row r of a head's first half goes to 2r, of its second half to 2r + 1: llama.cpp's order for llama models."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + row
        for head in range(num_heads)
        for row in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """Writes Hugging Face weights as GGUF; matrices in type `kind`, vectors in float32.

    `metadata` overrides METADATA (a None leaves a key out), `extra` holds full keys, `tensors` extra tensors.
    """
    writer = GGUFWriter(path, arch)
    values = {f"{arch}.{key}": value for key, value in {**METADATA, **(metadata or {})}.items()}
    for key, value in {**values, **(extra or {})}.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        if value is not None:
            add[type(value)](key, value)
    heads = {"attn_q": METADATA["attention.head_count"], "attn_k": METADATA["attention.head_count_kv"]}
    for name, weight in weights.items():
        stored = gguf_name(name)
        part = stored.split(".")[-2]
        if arch == "llama" and part in heads:
            weight = permute(weight, heads[part])
        array = weight.float().numpy()
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, quantize(array, kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def string(text: str | bytes) -> bytes:
    """A GGUF string."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def header(num_tensors: int, num_keys: int, body: bytes = b"", *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """The start of a GGUF file, true or not."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + body
