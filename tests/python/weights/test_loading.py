"""load_model: the native model gets every weight, memory stays within bounds, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedModelError
from steploop.pack import pack_model
from steploop.weights import load_model, open_checkpoint, resolve_dtype


def test_tiny(tiny_llama: Path) -> None:
    model = load_model(open_checkpoint(tiny_llama), "float32")
    assert model.weight_bytes >= open_checkpoint(tiny_llama).spec.num_parameters() * 4


Weights = dict[str, torch.Tensor]


def drop(weights: Weights) -> None:
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]


def add(weights: Weights) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(128, 64)
    weights["surprise"] = torch.ones(1)


def reshape(weights: Weights) -> None:
    weights["lm_head.weight"] = torch.ones(299, 64)
    weights["model.norm.weight"] = torch.ones(1, 64)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (drop, ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]),
        (add, ["model.layers.2.mlp.up_proj.weight", "surprise"]),
        (reshape, ["lm_head.weight", r"\[300, 64\]", r"\[299, 64\]", "model.norm.weight", r"\[1, 64\]"]),
    ],
)
def test_all_that_does_not_fit_is_named(
    tiny_llama: Path, tmp_path: Path, change: Callable[[Weights], None], names: list[str]
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    for name in names:
        with pytest.raises(ModelLoadError, match=name):
            load_model(open_checkpoint(folder), "float32")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"head_dim": 48}, UnsupportedModelError, "head_dim"),
        # Refused before anything of that size is allocated.
        ({"hidden_size": 2**24, "intermediate_size": 2**24}, ModelLoadError, "GiB|TiB"),
        ({"num_hidden_layers": 4000, "hidden_size": 65536}, ModelLoadError, "of memory"),
    ],
)
def test_shapes_that_cannot_be(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, int], error: type[Exception], words: str
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=words):
        load_model(open_checkpoint(folder), "float32")


def test_dtype(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    assert [resolve_dtype(dtype, checkpoint) for dtype in ("auto", "float32", "bfloat16")] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    with pytest.raises(InvalidArgumentError, match="dtype must be one of"):
        resolve_dtype("int8", checkpoint)
    assert [resolve_dtype(dtype, checkpoint, "cuda") for dtype in ("auto", "float16")] == ["bfloat16", "float16"]


@pytest.fixture(scope="module")
def medium_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 132 million bfloat16 weights (265 MB) in two shards, an eighth of them in each embedding."""
    folder = tmp_path_factory.mktemp("medium-llama")
    vocab, hidden, inner, layers = 16000, 1024, 4096, 6
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[Weights] = [{}, {}]
    shards[0]["model.embed_tokens.weight"] = torch.full((vocab, hidden), 0.5, dtype=torch.bfloat16)
    shards[1]["lm_head.weight"] = torch.full((vocab, hidden), 0.5, dtype=torch.bfloat16)
    shards[1]["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shards[layer % 2][f"{prefix}self_attn.{name}_proj.weight"] = torch.full(
                (hidden, hidden), 0.5, dtype=torch.bfloat16
            )
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shards[layer % 2][f"{prefix}mlp.{name}_proj.weight"] = torch.full(shape, 0.5, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards[layer % 2][f"{prefix}{name}.weight"] = torch.ones(hidden)
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


PEAK_SCRIPT = """
import sys
import torch
from steploop import _C
from steploop.weights import load_model, open_checkpoint

def status_bytes(name):
    with open("/proc/self/status") as status:
        [value] = [line.split()[1] for line in status if line.startswith(name)]
    return int(value) * 1024

libraries = status_bytes("VmRSS")  # a torch for CUDA takes 450 MB more than one for the CPU
model = load_model(open_checkpoint(sys.argv[1]), sys.argv[2])
print(status_bytes("VmHWM") - libraries)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["folder", "gguf", "packed"])
def test_peak_memory(medium_llama: Path, demo_model: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    path = demo_model if kind == "gguf" else medium_llama
    if kind == "packed":
        pack_model(path, tmp_path, dtype=dtype)
        path = tmp_path
    result = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(path), dtype], capture_output=True, text=True, check=True
    )
    weight_bytes = open_checkpoint(path).spec.num_parameters() * {"float32": 4, "bfloat16": 2}[dtype]
    assert int(result.stdout) <= 1.3 * weight_bytes + 80e6
