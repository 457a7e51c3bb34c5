"""Where a model comes from: paths, hub names, and what is never downloaded."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from steploop.errors import ModelLoadError
from steploop.weights import TokenizerFiles, find_tokenizer, open_checkpoint


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./no-such-folder", "~/no-such-folder", "a/b/c", "no-such.gguf", "a\0b", "-x", "a b"],
)
def test_neither_path_nor_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # nor is the hub asked
    for find in (open_checkpoint, find_tokenizer):
        with pytest.raises(ModelLoadError, match="there is no file or folder|cannot be opened"):
            find(name)


def test_no_name() -> None:
    with pytest.raises(ModelLoadError):
        open_checkpoint("")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02" * 100)
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_checkpoint(path)


def test_hub_name(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("some-org/some-model", revision="v2")
    assert checkpoint.path == tiny_llama
    [(name, options)] = calls
    assert (name, options["revision"]) == ("some-org/some-model", "v2")

    def allowed(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in options["allow_patterns"]) and not any(
            fnmatch.fnmatch(file, pattern) for pattern in options["ignore_patterns"]
        )

    for file in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"):
        assert allowed(file)
    for file in (
        "pytorch_model.bin",
        "model.pt",
        "modeling_custom.py",
        "model.gguf",
        "training.pkl",
        "README.md",
        "onnx/config.json",
    ):
        assert not allowed(file)


def test_download_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match="some-org/some-model.*no route to host.*HF_TOKEN"):
        open_checkpoint("some-org/some-model")


def test_tokenizer(tiny_llama: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_tokenizer(tiny_llama) == TokenizerFiles(path=str(tiny_llama))
    assert find_tokenizer(demo_model) == TokenizerFiles(path=str(demo_model.parent), gguf_file=demo_model.name)
    calls: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if len(calls) > 1:
            raise ConnectionError("no route to host")
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_tokenizer("some-org/some-model") == TokenizerFiles(path=str(tiny_llama))
    assert (calls[0]["name"], calls[0]["revision"]) == ("some-org/some-model", None)
    assert not any(fnmatch.fnmatch("model.safetensors", pattern) for pattern in calls[0]["allow_patterns"])
    with pytest.raises(ModelLoadError, match="downloading a tokenizer of that name.*no route to host"):
        find_tokenizer("some-org/some-model")
    assert len(calls) == 2
