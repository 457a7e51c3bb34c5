"""Model folders: single and sharded safetensors, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steploop.errors import ModelLoadError, SteploopError, UnsupportedModelError
from steploop.weights import open_checkpoint


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in open_checkpoint(path).tensors(torch.float32)}


def test_single_file(tiny_llama: Path) -> None:
    expected = load_file(tiny_llama / "model.safetensors")
    actual = tensors_of(tiny_llama)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_sharded(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = tensors_of(tiny_llama)
    actual = tensors_of(tmp_path)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("stored", "expected"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "bfloat16")]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_auto_dtype(folder: Path, stored: torch.dtype, expected: str, key: str | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    if key is not None:
        config[key] = str(stored).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(stored) for name, tensor in weights.items()}, folder / "model.safetensors")
    assert open_checkpoint(folder).dtype == expected


def test_computed_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors")
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in tensors_of(folder)


def test_defaults_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3], "temperature": 0.5}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation.eos_token_ids == (1, 3)
    assert checkpoint.generation.sampling == {"temperature": 0.5}
    assert checkpoint.tokenizer is not None
    for path in folder.glob("token*"):
        path.unlink()
    assert open_checkpoint(folder).tokenizer is None


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def cut(size: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return damage


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def index(weight_map: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def two_files(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")


def same_tensor_twice(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    index({"x": "part.safetensors", "y": "b.safetensors"})(folder)


def integer_weights(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (remove("config.json"), ModelLoadError, "no config.json"),
        (write("config.json", "{"), ModelLoadError, "not readable JSON"),
        (write("config.json", "[" * 100_000), ModelLoadError, "not readable JSON"),
        (write("config.json", b"\xff\xfe"), ModelLoadError, "not readable JSON"),
        (write("config.json", "[]"), ModelLoadError, "JSON object"),
        (write("config.json", '{"architectures": ["BertModel"]}'), UnsupportedModelError, "LlamaForCausalLM"),
        (write("generation_config.json", "nonsense"), ModelLoadError, "generation_config.json"),
        (remove("model.safetensors"), ModelLoadError, "no safetensors file"),
        (only_pickle, ModelLoadError, "pickle.*pytorch_model.bin.*runs code"),
        (cut(0), ModelLoadError, "not a whole safetensors file"),
        (cut(7), ModelLoadError, "not a whole safetensors file"),
        (cut(100), ModelLoadError, "not a whole safetensors file"),
        (cut(50_000), ModelLoadError, "not a whole safetensors file"),
        (two_files, ModelLoadError, "index.json"),
        (index({"a": "part.safetensors", "b": "gone.safetensors"}), ModelLoadError, "gone.safetensors"),
        (index({"a": "../part.safetensors"}), ModelLoadError, "not a file of this folder"),
        (index({"a": "/etc/passwd"}), ModelLoadError, "not a file of this folder"),
        (index({"a": 3}), ModelLoadError, "weight_map"),
        (index([]), ModelLoadError, "weight_map"),
        (same_tensor_twice, ModelLoadError, "in both"),
        (integer_weights, ModelLoadError, "model.norm.weight.*I8"),
    ],
)
def test_bad_folder(folder: Path, damage: Callable[[Path], object], error: type[SteploopError], words: str) -> None:
    damage(folder)
    with pytest.raises(error, match=f"(?s){words}"):
        tensors_of(folder)
