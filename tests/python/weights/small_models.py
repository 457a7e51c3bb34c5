"""Small random models of every architecture, in shapes that both 8 and 4 bits take, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from steploop import LLMEngine

from ..engine.serving import make_engine

KINDS = {"Q4_0": GGMLQuantizationType.Q4_0, "Q4_1": GGMLQuantizationType.Q4_1, "Q8_0": GGMLQuantizationType.Q8_0}
SHAPE: dict[str, Any] = {
    "vocab_size": 250,  # not a multiple of the kernels' panel of 32
    "hidden_size": 96,  # a group of 64 and half of one, three of 32
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 128}),
    "qwen2": ("Qwen2", {"hidden_size": 256}),  # biases of q, k and v; heads of hidden_size / num_attention_heads
    "qwen3": ("Qwen3", {}),  # QK-norm
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}
"""Each model's family in transformers, and what differs from SHAPE."""
BIASED = ("llama-biases", "qwen2")


def make_model(name: str, **changes: Any) -> Any:
    """The transformers model in float32. Norms, biases and channels differ in size, so that each of them matters."""
    import transformers

    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **own, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.08).mul_(torch.exp(0.5 * torch.randn(len(parameter), 1)))
    return model


def save_model(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with that model, without a tokenizer."""
    make_model(name, **changes).save_pretrained(folder)
    return folder


def logits_of(model: Any, token_ids: list[int], **settings: Any) -> torch.Tensor:
    settings = {"kv_cache_dtype": "float32", "num_kv_blocks": 64, "num_threads": 1, **settings}
    return torch.from_numpy(make_engine(model, **settings).teacher_forced_logits(token_ids))


def some_tokens(vocab_size: int, count: int = 120) -> list[int]:
    return np.random.default_rng(1).integers(0, vocab_size, count).tolist()


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference in units of the norm of what is expected, both without each row's mean."""
    got, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (got, expected))
    return float((got - expected).norm() / expected.norm())


def tokens_by_request(engine: LLMEngine) -> dict[str, tuple[list[int], list[float]]]:
    results: dict[str, tuple[list[int], list[float]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            sample = output.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            results[output.request_id] = (list(sample.token_ids), logprobs)
    return results
