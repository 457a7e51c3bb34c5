"""Models whose linear weights are codes of 8 or 4 bits: logits, batch invariance, and what cannot be loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steploop import _C
from steploop.errors import InvalidArgumentError, ModelLoadError, UnsupportedDeviceError, UnsupportedModelError
from steploop.weights import open_checkpoint
from steploop.weights.quantize import input_group, quantize_int4, quantize_int8, rotate

from .serving import make_engine, random_work
from .test_batch_invariance import ISAS, check

LINEARS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "lm_head": "lm_head",
}
ALL = tuple(dict.fromkeys(LINEARS.values()))
Quantized = tuple[torch.Tensor, ...]


def quantized(weight: torch.Tensor, kind: str) -> Quantized:
    return quantize_int8(weight) if kind == "int8" else quantize_int4(weight)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    if minimums is None:
        return codes.float() * scales.repeat_interleave(input_group(codes.shape[1]), 1)[:, : codes.shape[1]]
    groups = codes.view(len(codes), -1, 32).float() * scales.float()[..., None] + minimums.float()[..., None]
    return groups.view(codes.shape)


def load_pair(folder: Path, formats: dict[str, str], *, turn: bool = False) -> tuple[Any, Any]:
    """The quantised model, and a float32 one of the weights that its codes stand for."""
    checkpoint = open_checkpoint(str(folder), None)
    model = _C.Model(checkpoint.spec.to_native(formats, formats if turn else ()), dtype="float32")
    plain = _C.Model(checkpoint.spec.to_native(), dtype="float32")
    for name, tensor in checkpoint.tensors(torch.float32):
        format_ = formats.get(LINEARS.get(name.split(".")[-2], ""))
        if format_ is None:
            model.load_weight(name, tensor)
            plain.load_weight(name, tensor)
            continue
        parts = quantized(rotate(tensor) if turn else tensor, format_)
        meant = dequantized(*parts)
        meant = rotate(meant) if turn else meant  # rotating twice turns back
        plain.load_weight(name, meant)
        if name == "lm_head.weight":
            model.load_weight(name, meant)
            name = "lm_head.codes"
        model.load_quantized_weight(name, *parts)
    model.finish_loading()
    plain.finish_loading()
    return model, plain


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("formats", "turn"),
    [
        (dict.fromkeys(ALL, "int8"), False),
        (dict.fromkeys(ALL, "int8"), True),
        (dict.fromkeys(ALL, "int4"), False),
        (dict.fromkeys(ALL, "int4"), True),
        ({"gate_up": "int8", "o": "int4"}, False),
    ],
)
def test_logits_and_batch_invariance(
    tiny_llama: Path,
    isa: str,
    formats: dict[str, str],
    turn: bool,
    needs_isa: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_isa(isa)
    monkeypatch.setenv("STEPLOOP_CPU_ISA", isa)
    model, plain = load_pair(tiny_llama, formats, turn=turn)
    rng = random.Random(1)
    tokens = [rng.randrange(300) for _ in range(120)]
    got, expected = (torch.from_numpy(make_engine(one).teacher_forced_logits(tokens)) for one in (model, plain))
    # What is left are the inputs' 8 bits: half a step of 1/127 of the largest, in each of eight layers.
    assert 1e-4 < float((got - expected).norm() / expected.norm()) < 0.05
    work = random_work(300, 24, longest=90, outputs=40, seed=2)
    assert check(model, work, "float32", longest_sequence=140, alone=len(work), variants=6) > 0


def test_weights_that_are_not_stored_as_the_model_says(tiny_llama: Path) -> None:
    spec = open_checkpoint(str(tiny_llama), None).spec
    model = _C.Model(spec.to_native({"o": "int8", "down": "int4"}), dtype="bfloat16")
    o, down = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"
    weight = torch.randn(64, 128)
    int8, int4 = quantized(weight, "int8"), quantized(weight, "int4")
    for load, message in (
        (lambda: model.load_weight(o, weight), "must be int8 codes, got float32"),
        (lambda: model.load_quantized_weight(o, *int4), "must be stored as int8, got int4"),
        (lambda: model.load_quantized_weight(down, *int8), "must be stored as int4, got int8"),
        (lambda: model.load_quantized_weight(o, int8[0].float(), int8[1]), "must be int8, got torch.float32"),
        (lambda: model.load_quantized_weight(o, int8[0], int8[1][:5]), "does not fit its codes"),
        (lambda: model.load_quantized_weight(o, int8[0].T, int8[1]), "contiguous"),
        (lambda: model.load_quantized_weight(o, 7, int8[1]), "is not a torch.Tensor"),
        (lambda: model.load_quantized_weight(down, *(part[:, :1] for part in int4)), "a multiple of 32 columns"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            load()
    model.load_quantized_weight(o, *int8)
    model.load_quantized_weight(o, *int8)
    with pytest.raises(ModelLoadError, match=f"repeated {o}.*missing {down}"):
        model.finish_loading()


def test_formats_that_cannot_be(tiny_llama: Path) -> None:
    spec = open_checkpoint(str(tiny_llama), None).spec
    with pytest.raises(InvalidArgumentError, match="quantization must be one of none, int8, int4, got fp8"):
        spec.to_native({"o": "fp8"})
    with pytest.raises(InvalidArgumentError, match="is one of qkv, o, gate_up, down or lm_head, got mlp"):
        spec.to_native({"mlp": "int8"})
    with pytest.raises(UnsupportedModelError, match="only a quantised down can be rotated"):
        spec.to_native({"o": "int8"}, ["down"])
    odd = {**spec.__dict__, "hidden_size": 80}
    with pytest.raises(UnsupportedModelError, match="int4 needs in_features to be a multiple of 32, got 80; int8 and"):
        _C.Model(type(spec)(**odd).to_native({"qkv": "int4"}), dtype="bfloat16")
    with pytest.raises(UnsupportedDeviceError):
        _C.Model(spec.to_native({"qkv": "int8"}), dtype="bfloat16", device="cuda")
