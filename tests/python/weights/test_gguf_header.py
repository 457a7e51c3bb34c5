"""GGUF headers, true, truncated, absurd and random: a header or one typed error, at once."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from steploop.errors import ModelLoadError, UnsupportedModelError
from steploop.weights import open_checkpoint
from steploop.weights.gguf_header import read_gguf_header

from .gguf_writing import METADATA, header, string, write_gguf

U8, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with one layer's worth of keys and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    weights = {"model.embed_tokens.weight": torch.ones(8, 64), "model.norm.weight": torch.ones(64)}
    write_gguf(path, weights, extra={"tokenizer.ggml.tokens": ["a", "bc"], "general.languages": ["en"]})
    return path.read_bytes()


def test_valid(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(small)
    parsed = read_gguf_header(path)
    assert parsed.metadata["general.architecture"] == "llama"
    assert parsed.metadata["llama.block_count"] == METADATA["block_count"]
    assert "tokenizer.ggml.tokens" not in parsed.metadata  # walked over
    embedding = parsed.tensors["token_embd.weight"]
    assert embedding.shape == (8, 64)
    assert np.frombuffer(small, np.float32, count=8 * 64, offset=embedding.offset).tolist() == [1.0] * 512


def test_every_type(tmp_path: Path) -> None:
    body = b"".join(
        [
            key("u8", U8, b"\x07"),
            key("i32", I32, struct.pack("<i", -3)),
            key("f32", F32, struct.pack("<f", 0.5)),
            key("bool", BOOL, b"\x01"),
            key("u64", U64, struct.pack("<Q", 2**40)),
            key("text", STRING, string("äß")),
            key("short", ARRAY, struct.pack("<IQ3i", I32, 3, 1, 2, 3)),
            key("long", ARRAY, struct.pack("<IQ", U8, 5000) + bytes(5000)),
        ]
    )
    path = tmp_path / "f.gguf"
    path.write_bytes(header(0, 8, body) + bytes(64))
    assert read_gguf_header(path).metadata == {
        "u8": 7, "i32": -3, "f32": 0.5, "bool": True, "u64": 2**40, "text": "äß", "short": [1, 2, 3],
    }  # fmt: skip


HUGE = 2**62
BAD = [
    (b"", "cannot be read"),
    (b"GGU", "truncated"),
    (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    (header(0, 0, version=1), "version 1 is not supported"),
    (header(0, 0, version=99), "version 99 is not supported"),
    (header(0, 0, version=3 << 24), "big-endian"),
    (header(HUGE, 0), "claims 4611686018427387904 tensors"),
    (header(0, HUGE), "claims 4611686018427387904 metadata keys"),
    (header(2**64 - 1, 2**64 - 1), "claims"),
    (header(0, 1000, bytes(100)), "claims 1000 metadata keys"),
    (header(0, 1, struct.pack("<Q", HUGE) + bytes(64)), "a metadata key takes 4611686018427387904 bytes"),
    (header(0, 1, string(b"\xff\xfe") + bytes(64)), "not UTF-8"),
    (header(0, 1, key("a", 77, bytes(64))), "unknown type 77"),
    (header(0, 2, key("a", U8, b"1") * 2 + bytes(64)), "'a' is there twice"),
    (header(0, 1, key("a", STRING, struct.pack("<Q", 2**63) + bytes(64))), "takes 9223372036854775808 bytes"),
    (header(0, 1, key("a", ARRAY, struct.pack("<IQ", STRING, HUGE) + bytes(64))), "claims .* entries in 'a'"),
    (header(0, 1, key("a", ARRAY, struct.pack("<IQ", I32, HUGE) + bytes(64))), "claims .* entries in 'a'"),
    (header(0, 1, key("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + bytes(64))), "a string in 'a'"),
    (header(0, 1, key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))), "array of unknown type 9"),
    (header(0, 1, key("general.alignment", I32, struct.pack("<i", 0)) + bytes(64)), "power of two"),
    (header(0, 1, key("general.alignment", I32, struct.pack("<i", 24)) + bytes(64)), "power of two"),
    (header(0, 1, key("general.alignment", STRING, string("32")) + bytes(64)), "power of two"),
    (header(1, 0, string("t") + struct.pack("<I", 0) + bytes(64)), "1 to 4 dimensions, got 0"),
    (header(1, 0, string("t") + struct.pack("<I", 2**31) + bytes(64)), "1 to 4 dimensions"),
    (header(1, 0, tensor("t", [0]) + bytes(64)), r"shape \[0\]"),
    (header(1, 0, tensor("t", [HUGE, HUGE]) + bytes(64)), "truncated: tensor 't'"),
    (header(1, 0, tensor("t", [64], offset=2**63) + bytes(512)), "truncated: tensor 't'"),
    (header(1, 0, tensor("t", [64], kind=999) + bytes(512)), "unknown type 999"),
    (header(1, 0, tensor("t", [33], kind=2) + bytes(512)), "type Q4_0 cannot have"),
    (header(2, 0, tensor("t", [4]) * 2 + bytes(512)), "tensor 't' is there twice"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_bad_header(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_truncated_anywhere(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    for size in [*range(0, 1000, 7), len(small) // 2, len(small) - 1]:
        path.write_bytes(small[:size])
        with pytest.raises(ModelLoadError):
            open_checkpoint(path)


def open_or_refuse(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        for _, weight in open_checkpoint(path).tensors(torch.bfloat16):
            assert weight.numel() * 2 <= 40 * len(data) + 4096  # nothing is allocated that the file does not hold
    except (ModelLoadError, UnsupportedModelError):
        pass


keys = st.builds(
    key,
    st.sampled_from([*(f"llama.{name}" for name in METADATA), "general.architecture", "general.alignment", "x"]),
    st.integers(0, 13),
    st.one_of(st.binary(max_size=24), st.text(max_size=5).map(string), st.just(string("llama"))),
)
tensors = st.builds(
    tensor,
    st.sampled_from(["token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.weight", "?"]),
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)), min_size=1, max_size=4),
    st.integers(0, 40),
    st.one_of(st.integers(0, 256), st.integers(0, 2**64 - 1)),
)


@settings(max_examples=300, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(*[st.one_of(st.none(), st.integers(0, 2**64 - 1))] * 2),
    parts=st.tuples(st.lists(keys, max_size=8), st.lists(tensors, max_size=4)),
    tail=st.binary(max_size=2048),
)
def test_any_structure(
    tmp_path: Path, counts: tuple[int | None, int | None], parts: tuple[list[bytes], list[bytes]], tail: bytes
) -> None:
    num_tensors, num_keys = (len(p) if c is None else c for c, p in zip(counts, reversed(parts), strict=True))
    body = b"".join(parts[0] + parts[1]) + tail
    open_or_refuse(tmp_path / "f.gguf", header(num_tensors, num_keys, body))


@settings(max_examples=300, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@example(data=None)
def test_any_changed_bytes(small: bytes, tmp_path: Path, data: st.DataObject | None) -> None:
    changed = bytearray(small)
    if data is not None:
        positions = st.integers(0, min(1200, len(small)) - 1)
        for position, value in data.draw(st.dictionaries(positions, st.integers(0, 255), min_size=1)).items():
            changed[position] = value
    open_or_refuse(tmp_path / "f.gguf", bytes(changed))
