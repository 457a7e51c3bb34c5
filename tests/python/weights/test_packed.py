"""Packed models: what is saved is what is loaded, and what cannot be asked of them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from steploop import _C, LLMEngine, SamplingParams
from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedDeviceError
from steploop.pack import pack_model
from steploop.tokenizer import SavedTokenizer, Tokenizer
from steploop.weights import (
    PackedCheckpoint,
    find_tokenizer,
    load_model,
    open_checkpoint,
    resolve_dtype,
)
from steploop.weights.packed_file import PACKED_FILE_NAME

from .packing import SMALL, contents, digest, make_model, pack

SPECS = {
    "untied": SMALL,
    "tied": dataclasses.replace(SMALL, tie_word_embeddings=True),
    "biases": dataclasses.replace(SMALL, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen3": dataclasses.replace(SMALL, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=80),
    "llama3": dataclasses.replace(
        SMALL,
        rope_theta=5e5,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_max_position_embeddings=64,
        sliding_window=99,
    ),
    "odd": dataclasses.replace(SMALL, vocab_size=33, hidden_size=70),  # arrays that are no whole cache lines
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_array_comes_back(tmp_path: Path, name: str, dtype: str) -> None:
    path, model = pack(tmp_path, SPECS[name], dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, PackedCheckpoint)
    assert (checkpoint.spec, checkpoint.dtype, checkpoint.quantization) == (SPECS[name], dtype, None)
    assert checkpoint.generation.eos_token_ids == (3, 5)
    assert checkpoint.generation.sampling == {"temperature": 0.5, "max_tokens": 7}
    assert checkpoint.tokenizer is None
    loaded = load_model(checkpoint, dtype)
    assert contents(loaded) == contents(model)
    assert contents(load_model(open_checkpoint(path), dtype)) == contents(model)  # the file itself, too
    assert loaded.weight_bytes == model.weight_bytes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised(tmp_path: Path, quantization: str) -> None:
    _, model = pack(tmp_path, quantization=quantization)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, PackedCheckpoint)
    assert checkpoint.quantization == quantization
    assert contents(load_model(checkpoint, "bfloat16")) == contents(model)


# A change here means that the layout has changed: raise kPackedLayoutVersion, too, or old files load as nonsense.
LAYOUTS = {
    2: {
        ("float32", None): "d500ce4f12c68be9",
        ("bfloat16", None): "ea1a05111155bed3",
        ("bfloat16", "int8"): "a273be1be3e116a1",
        ("bfloat16", "int4"): "a90b2ade909cd075",
    }
}


def test_layout_belongs_to_its_version() -> None:
    spec = dataclasses.replace(SMALL, qkv_bias=True)
    formats = LAYOUTS[_C.PACKED_LAYOUT_VERSION]
    assert {key: digest(make_model(spec, *key)[0]) for key in formats} == formats


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    path, model = pack(tmp_path)
    with safe_open(path, framework="pt") as file:
        arrays = {name: bytes(file.get_tensor(name).numpy()) for name in file.keys()}
        assert file.metadata()["format"] == "steploop-packed"
    assert arrays == contents(model)
    data = path.read_bytes()
    for array in arrays.values():
        assert data.find(array) % 64 == 0


def test_arrays_keep_their_model(tmp_path: Path) -> None:
    """And cannot be written any more once it is loaded."""
    array = pack(tmp_path)[1].packed_arrays()["layers.1.down.weights"]
    assert array.readonly and any(array)
    fresh = _C.Model(SMALL.to_native(), dtype="float32")
    assert not fresh.packed_arrays()["layers.1.down.weights"].readonly


def test_either_tensors_or_arrays() -> None:
    model = _C.Model(SMALL.to_native(), dtype="float32")
    model.load_weight("model.norm.weight", torch.ones(SMALL.hidden_size))
    with pytest.raises(ModelLoadError, match="not both"):
        model.finish_packed_loading()
    packed = _C.Model(SMALL.to_native(), dtype="float32")
    packed.finish_packed_loading()
    with pytest.raises(ModelLoadError, match="after finish_loading"):
        packed.load_weight("model.norm.weight", torch.ones(SMALL.hidden_size))


def test_dtype_and_device(tmp_path: Path) -> None:
    pack(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [resolve_dtype(dtype, checkpoint) for dtype in ("auto", "bfloat16")] == ["bfloat16", "bfloat16"]
    for function in (resolve_dtype, lambda dtype, checkpoint: load_model(checkpoint, dtype)):
        with pytest.raises(InvalidArgumentError, match="packed in bfloat16, got dtype float32"):
            function("float32", checkpoint)
    with pytest.raises(UnsupportedDeviceError, match="packed for device cpu, got device cuda"):
        resolve_dtype("auto", checkpoint, "cuda")
    with pytest.raises(ModelLoadError, match="take the original"):
        checkpoint.tensors(torch.float32)


def test_tokenizer(tiny_llama: Path, demo_model: Path, tmp_path: Path) -> None:
    """Comes with the model, which needs the original no more."""
    for source in (tiny_llama, Path(shutil.copy(demo_model, tmp_path / "m.gguf"))):
        folder = tmp_path / f"packed-{source.name}"
        pack_model(source, folder)
        original = Tokenizer.load(find_tokenizer(source))
        if source.is_file():
            source.unlink()
        saved = Tokenizer.load(find_tokenizer(folder / PACKED_FILE_NAME))
        assert isinstance(saved, SavedTokenizer)
        assert (saved.bos_token_id, saved.eos_token_id) == (original.bos_token_id, original.eos_token_id)
        chat = [{"role": "user", "content": "hi"}]
        # Once alone, and once more with transformers behind it.
        for rendered in (original.render_chat(chat), saved.render_chat(chat)):
            assert rendered == original.render_chat(chat)
            for text in ("Hello, wörld 123!\n\n  x", "<|im_end|></s><|user|>", "<s>a", "", rendered):
                assert saved.encode(text) == original.encode(text)
                assert saved.encode_rendered(text) == original.encode_rendered(text)
                assert saved.decode(original.encode(text)) == original.decode(original.encode(text))
            some = [0, 1, 2, 3, 300]
            assert saved.decode(some, skip_special_tokens=True) == original.decode(some, skip_special_tokens=True)
        assert contents(load_model(open_checkpoint(folder), open_checkpoint(folder).dtype))


def test_without_a_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    """Token ids will do."""
    pack_model(tiny_llama, tmp_path)
    for path in tmp_path.glob("*token*"):
        path.unlink()
    with LLMEngine(model=tmp_path, max_num_seqs=1) as engine:
        assert engine.tokenizer is None
        engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in iter(engine.drain())] == [4]


def test_damaged_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    for name, damage in (
        ("tokenizer.json", "{}"),
        ("steploop_tokenizer.json", "[]"),
        ("steploop_tokenizer.json", '{"eos_token_id": "x"}'),
    ):
        pack_model(tiny_llama, tmp_path)
        (tmp_path / name).write_text(damage)
        with pytest.raises(ModelLoadError, match="tokenizer"):
            Tokenizer.load(find_tokenizer(tmp_path))
    pack_model(tiny_llama, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    tokenizer = Tokenizer.load(find_tokenizer(tmp_path))
    assert tokenizer.encode("a")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


START = """
import sys
from steploop import LLMEngine

LLMEngine(model=sys.argv[1], max_num_seqs=1).close()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_what_a_start_imports(tiny_llama: Path, tmp_path: Path) -> None:
    """Neither of those that take seconds."""
    pack_model(tiny_llama, tmp_path)
    command = [sys.executable, "-c", START, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_packed_again(tiny_llama: Path, tmp_path: Path) -> None:
    """A packed model is packed as it is, also into its own folder, and nothing of the old one stays."""
    pack_model(tiny_llama, tmp_path / "a")
    (tmp_path / "a" / "vocab.json").write_text("{}")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    for folder in ("b", "a"):
        pack_model(tmp_path / "a", tmp_path / folder)
    assert not (tmp_path / "a" / "vocab.json").exists()
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    files = [(tmp_path / folder / PACKED_FILE_NAME).read_bytes() for folder in ("a", "b")]
    assert files[0] == files[1]
    with pytest.raises(InvalidArgumentError, match="packed in float32, got dtype bfloat16"):
        pack_model(tmp_path / "a", tmp_path / "c", dtype="bfloat16")


def test_folders_that_hold_something_else(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    (tmp_path / "left-over" / ".packing-x").mkdir(parents=True)
    for name in ("file", "full"):
        with pytest.raises(InvalidArgumentError, match="must be a new folder"):
            pack_model(tiny_llama, tmp_path / name)
    for name in ("file/below", "nul\0l"):
        with pytest.raises(InvalidArgumentError, match="cannot|must be"):
            pack_model(tiny_llama, tmp_path / name)
    pack_model(tiny_llama, tmp_path / "left-over")  # by a run that was killed
    pack_model(tiny_llama, tmp_path / "new" / "below")


FULL_DISK = """
import resource, signal, sys
from steploop.errors import InvalidArgumentError
from steploop.pack import pack_model

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # as a full disk: writing more fails
try:
    pack_model(sys.argv[1], sys.argv[2])
except InvalidArgumentError as error:
    print(error)
"""


def test_disk_full(tiny_llama: Path, tmp_path: Path) -> None:
    """A model that was there before stays; of the new one nothing does."""
    pack_model(tiny_llama, tmp_path / "old")
    before = (tmp_path / "old" / PACKED_FILE_NAME).read_bytes()
    for folder in ("old", "new"):
        result = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(tiny_llama), str(tmp_path / folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "cannot be written into" in result.stdout and folder in result.stdout
    assert list((tmp_path / "new").iterdir()) == []
    assert (tmp_path / "old" / PACKED_FILE_NAME).read_bytes() == before
    assert len(list((tmp_path / "old").iterdir())) == len(list(tmp_path.glob("old/[!.]*")))
