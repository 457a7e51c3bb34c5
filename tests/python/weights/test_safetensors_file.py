"""Damaged and hostile safetensors files: one typed error, at once."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from steploop.errors import ModelLoadError
from steploop.weights.safetensors_file import SafetensorsFile

VALID = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "empty": torch.zeros(0)})

sizes = st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I8", "F8_E4M3", "nonsense"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, max_size=3),
    }
)
headers = st.one_of(
    st.dictionaries(st.text(max_size=4), st.one_of(entries, st.none(), st.integers()), max_size=3).map(json.dumps),
    st.text(max_size=20),
)


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in SafetensorsFile(path).tensors()}


def read_or_refuse(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with contextlib.suppress(ModelLoadError):
        read(path)


def test_valid(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(VALID)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in read(path).items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((4,), torch.bfloat16),
        "empty": ((0,), torch.float32),
    }


def test_float64_becomes_float32(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(save({"a": torch.tensor([1.5, -2.0], dtype=torch.float64)}))
    assert torch.equal(read(path)["a"], torch.tensor([1.5, -2.0]))


def test_groups_close_the_file_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steploop.weights import safetensors_file

    monkeypatch.setattr(safetensors_file, "_GROUP_SIZE_BYTES", 300)
    expected = {f"t{i}": torch.full((50,), float(i)) for i in range(7)}
    path = tmp_path / "f.safetensors"
    path.write_bytes(save(expected))
    actual = read(path)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("size", range(len(VALID)))
def test_truncated(tmp_path: Path, size: int) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(VALID[:size])
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        read(path)


@settings(max_examples=300, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=headers, claimed=st.one_of(st.none(), st.integers(0, 2**64 - 1)), body=st.binary(max_size=64))
@example(header="{}", claimed=2**63, body=b"")
@example(
    header=json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}), claimed=None, body=b""
)
def test_any_header(tmp_path: Path, header: str, claimed: int | None, body: bytes) -> None:
    raw = header.encode("utf-8", "surrogatepass")
    length = len(raw) if claimed is None else claimed
    read_or_refuse(tmp_path / "f.safetensors", struct.pack("<Q", length) + raw + body)


@settings(max_examples=300, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.integers(0, len(VALID) - 1), st.integers(0, 255), min_size=1, max_size=6))
def test_any_changed_bytes(tmp_path: Path, changes: dict[int, int]) -> None:
    data: Any = bytearray(VALID)
    for position, value in changes.items():
        data[position] = value
    read_or_refuse(tmp_path / "f.safetensors", bytes(data))
