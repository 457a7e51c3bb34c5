"""Random checkpoints of each architecture, written by transformers and read by steploop, give transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steploop.weights import load_model, open_checkpoint

from .serving import make_engine

COMMON = {
    "vocab_size": 250,  # not a multiple of the kernels' panel of 32
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-80": ("Llama", {"head_dim": 80}),
    "llama-head-96": ("Llama", {"head_dim": 96}),
    "llama-head-128": ("Llama", {"head_dim": 128}),
    "llama-head-256": ("Llama", {"head_dim": 256, "num_attention_heads": 2}),
    "llama-linear-scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3-scaling": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": 24 * 4, "hidden_size": 96 * 4}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "qwen3-tied-mha": ("Qwen3", {"head_dim": 64, "num_key_value_heads": 4, "tie_word_embeddings": True}),
}


def make_reference(name: str) -> Any:
    import transformers

    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # wide enough that attention and biases matter
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.08)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make_reference(name)
    reference.save_pretrained(tmp_path)
    token_ids = np.random.default_rng(1).integers(0, COMMON["vocab_size"], 600).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    scale = float(expected.abs().max())

    checkpoint = open_checkpoint(str(tmp_path), None)
    model = load_model(checkpoint, "float32")
    for isa in ("", "portable"):  # the best one, and the one that every machine has
        monkeypatch.setenv("STEPLOOP_CPU_ISA", isa)
        logits = torch.from_numpy(make_engine(model).teacher_forced_logits(token_ids))
        assert float((logits - expected).abs().max()) <= 2e-5 * max(1.0, scale)

    monkeypatch.delenv("STEPLOOP_CPU_ISA")
    logits = torch.from_numpy(make_engine(load_model(checkpoint, "bfloat16")).teacher_forced_logits(token_ids))
    relative = float((logits - expected).norm() / expected.norm())
    assert relative <= 3e-2
