"""Packed files that are damaged, hostile, of another version or of another model: one typed error, before use."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from steploop.errors import ModelLoadError, UnsupportedModelError
from steploop.weights import load_model, open_checkpoint, resolve_dtype
from steploop.weights.packed_file import PACKED_FILE_NAME

from .packing import Header, change_content, change_header, pack, split


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("packed"))[0]


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copy(whole, tmp_path / PACKED_FILE_NAME))


def load(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint, resolve_dtype("auto", checkpoint))


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 64)


def flip(position: int) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return damage


def claim(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


def header(change: Callable[[Header], object]) -> Callable[[Path], object]:
    return lambda path: change_header(path, change)


def metadata(**changes: object) -> Callable[[Path], object]:
    return header(lambda header: header["__metadata__"].update(changes))


def content(**changes: object) -> Callable[[Path], object]:
    return lambda path: change_content(path, lambda content: content.update(changes))


def spec(**changes: object) -> Callable[[Path], object]:
    return lambda path: change_content(path, lambda content: content["model"].update(changes))


def without(*keys: str) -> Callable[[Path], object]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return lambda path: change_content(path, change)


def checksum(value: object) -> Callable[[Path], object]:
    """Another in the header, which stays as long as it was."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        before = split(data)[0]["__metadata__"]["checksum"].encode() + b'"'
        text = json.dumps(value)[1:].encode()
        path.write_bytes(data.replace(before, text + b" " * (len(before) - len(text)), 1))

    return damage


def drop_last(header: Header) -> int:
    """Takes the last array out, and says how long it was."""
    name = list(header)[-1]
    checksums = json.loads(header["__metadata__"]["checksums"])
    del checksums[name]
    header["__metadata__"]["checksums"] = json.dumps(checksums)
    return int(header.pop(name)["shape"][0])


def missing_array(path: Path) -> None:
    sizes: list[int] = []
    change_header(path, lambda header: sizes.append(drop_last(header)))
    path.write_bytes(path.read_bytes()[: -sizes[0]])


def rename(path: Path, old: str, new: str) -> None:
    def change(header: Header) -> None:
        header[new] = header.pop(old)
        header["__metadata__"]["checksums"] = header["__metadata__"]["checksums"].replace(f'"{old}"', f'"{new}"')

    change_header(path, change)


def same_name_twice(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(b'"layers.1.down.weights"', b'"layers.0.down.weights"')
    path.write_bytes(data[:8] + text + data[8 + length :])


def overlap(header: Header) -> None:
    header["layers.1.down.weights"]["data_offsets"] = header["layers.0.down.weights"]["data_offsets"]


def ordinary_weights(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, path)


NORM = "layers.0.input_norm.weights"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (metadata(layout="99", written_by="7.1"), "steploop 7.1 in layout 99; this version reads layout .*again"),
        (metadata(layout=1), "in layout 1"),
        (ordinary_weights, "none that `steploop pack` wrote"),
        (lambda path: path.write_bytes(b"GGUF" + b"\0" * 99), "not a whole safetensors file"),
        (lambda path: path.write_text("hello" * 99), "not a whole safetensors file"),
        *[(cut(size), "not a whole safetensors file") for size in (0, 7, 8, 100)],
        (cut(-64), "damaged"),
        (cut(-1), "damaged"),
        (append, "damaged"),
        (claim(0), "not readable JSON"),
        (claim(2**63), "not a whole safetensors file"),
        (flip(-1), r"damaged: the checksum of lm_head.weights is wrong"),
        (flip(-200_000), r"damaged: the checksum of .* is wrong"),
        (flip(200), "damaged|not readable JSON|none that"),
        (header(lambda header: header.pop("__metadata__")), "none that"),
        (header(lambda header: header.update(__metadata__=[1])), "none that"),
        (header(lambda header: header["__metadata__"].pop("checksum")), "checksum of its header"),
        *[(checksum(text), "checksum of its header") for text in ("", "0" * 64, "\ud800", '"')],
        (header(lambda header: header["__metadata__"].pop("content")), "content is not readable JSON"),
        (metadata(content=7), "content is not readable JSON"),
        (metadata(content="\ud800"), "content is not readable JSON"),
        (metadata(content="[" * 100_000), "content is not readable JSON"),
        (metadata(content="[]"), "content must hold a JSON object"),
        (metadata(checksums="{}"), "a checksum of each array"),
        (metadata(checksums='"\ud800"'), "checksums must hold a JSON object"),
        (metadata(checksums="7"), "checksums must hold a JSON object"),
        (content(surprise=1), "missing or unknown: surprise"),
        (without("generation"), "missing or unknown: generation"),
        (content(dtype="float16"), "dtype cannot be 'float16'"),
        (content(dtype=["bfloat16"]), "dtype cannot be"),
        (content(quantization=4), "quantization cannot be 4"),
        (content(options=[]), "options cannot be"),
        (content(options={"surprise": 1}), "cannot be made.*surprise"),
        (content(options={"self": 1}), "cannot be made"),
        (content(options={"linear_formats": {"qkv": 5}}), "cannot be made"),
        (content(options={"linear_formats": "abc"}), "cannot be made"),
        (content(options={"linear_formats": {"qkv": "int3"}}), "cannot be made.*int3"),
        (content(options={"linear_formats": {"wheel": "int8"}}), "cannot be made.*wheel"),
        (
            content(options={"linear_formats": {"qkv": "int8"}}),
            "does not fit its model.*layers.0.qkv.weights has 49152 bytes, not 33792",
        ),
        (content(generation={"eos_token_id": "x"}), "eos_token_id must be"),
        (content(generation={"temperature": "hot"}), "temperature"),
        (content(model=[]), "model cannot be"),
        (without("model", "vocab_size"), "missing or unknown: vocab_size"),
        (spec(wings=2), "missing or unknown: wings"),
        (spec(vocab_size="many"), "vocab_size must be an integer, got 'many'"),
        (spec(vocab_size=50.0), "vocab_size must be an integer"),
        (spec(vocab_size=True), "vocab_size must be an integer"),
        (spec(vocab_size=-1), "vocab_size must be >= 0"),
        (spec(num_layers=2**40), "num_layers must be <="),
        (spec(num_layers=4096), "describes a model of"),
        (spec(hidden_size=2**24, intermediate_size=2**24), "describes a model of"),
        (spec(rms_norm_eps=None), "rms_norm_eps must be a finite number"),
        (spec(rope_theta="big"), "rope_theta must be a finite number"),
        (spec(qk_norm=1), "qk_norm must be True or False"),
        (spec(rope_scaling=3), "rope_scaling must be a string"),
        (spec(sliding_window=0), "sliding_window must be >= 1"),
        (spec(qk_norm=True), "does not fit its model .4 problems.: missing layers.0.k_norm.weights"),
        (spec(tie_word_embeddings=True), "unexpected embedding.weights"),
        (spec(vocab_size=90), "embedding.weights has 9600 bytes, not 17280"),
        (spec(num_layers=1), "unexpected layers.1"),
        (missing_array, "missing lm_head.weights"),
        (lambda path: rename(path, NORM, "x"), f"missing {NORM}; unexpected x"),
        (same_name_twice, "damaged"),
        (header(overlap), "does not begin where"),
        (header(lambda header: header[NORM].update(dtype="F32")), "must be a run of bytes"),
        (header(lambda header: header[NORM].update(shape=[4, 96])), "must be a run of bytes"),
        (header(lambda header: header[NORM].update(data_offsets=[0, 2**70])), "must be a run of bytes"),
        (header(lambda header: header[NORM].update(data_offsets=[-64, 320])), "does not begin where"),
        (header(lambda header: header.update({NORM: None})), "must be a run of bytes"),
    ],
)
def test_refused(path: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(path)
    with pytest.raises(ModelLoadError, match=f"(?s){words}"):
        load(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (spec(architecture="BertModel"), "LlamaForCausalLM"),
        (spec(rope_scaling="yarn"), "yarn"),
        (spec(head_dim=48), "head_dim"),
    ],
)
def test_unsupported(path: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(path)
    with pytest.raises(UnsupportedModelError, match=words):
        load(path)


def test_file_that_shrinks_after_it_was_opened(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    cut(-5000)(path)
    with pytest.raises(ModelLoadError, match="has become shorter"):
        load_model(checkpoint, "bfloat16")
    path.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(checkpoint, "bfloat16")


def test_unharmed(path: Path) -> None:
    """What the changes above are made with leaves a file that does load."""
    change_content(path, lambda content: content["generation"].update(temperature=0.25))
    assert open_checkpoint(path).generation.sampling["temperature"] == 0.25
    assert load(path).weight_bytes > 0


def load_or_refuse(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with contextlib.suppress(ModelLoadError, UnsupportedModelError):
        load(path)


def test_any_byte_of_the_header(path: Path) -> None:
    """Changed at random, by itself or with others; and the file cut anywhere."""
    data = path.read_bytes()
    start = len(data) - len(split(data)[1])
    rng = random.Random(0)
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            changed[rng.randrange(start)] ^= rng.randrange(1, 256)
        if changed == data:
            continue
        path.write_bytes(changed)
        with pytest.raises((ModelLoadError, UnsupportedModelError)):
            load(path)
    for _ in range(100):
        path.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(ModelLoadError):
            load(path)


STRANGE: list[Any] = [None, True, -1, 0, 1, 2, 64, 2**31, 2**63, 2**70, 1e308, "", "x", "int8", [], {}, [1], {"a": 1}]


def test_any_value_in_the_content(path: Path) -> None:
    """Files whose checksums are right, and which say anything at all: loaded or refused, never worse."""
    data = path.read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        path.write_bytes(data)

        def change(content: dict[str, Any]) -> None:
            target = rng.choice([content, content["model"], content["generation"], content["options"]])
            target[rng.choice([*target, "linear_formats", "x"])] = rng.choice(STRANGE)

        change_content(path, change)
        load_or_refuse(path, path.read_bytes())


def test_any_value_in_the_layout(path: Path) -> None:
    data = path.read_bytes()
    rng = random.Random(2)
    for _ in range(300):
        path.write_bytes(data)

        def change(header: Header) -> None:
            entry = header[rng.choice([name for name in header if name != "__metadata__"])]
            value: Any = rng.choice(STRANGE)
            key = rng.choice(["dtype", "shape", "data_offsets"])
            entry[key] = [rng.choice(STRANGE), value] if rng.random() < 0.5 else value

        change_header(path, change)
        with pytest.raises(ModelLoadError):
            load(path)
