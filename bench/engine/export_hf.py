"""Writes a GGUF file as a Hugging Face model folder, for engines that read no GGUF.

python bench/engine/export_hf.py FOLDER                  # the demo model
python bench/engine/export_hf.py FOLDER --model FILE.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from steploop.demo.model import find_demo_model
from steploop.tokenizer import Tokenizer
from steploop.weights import Checkpoint, ModelSpec, open_checkpoint

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def export(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """Writes weights, configuration and tokenizer. The whole model is in memory meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(getattr(torch, dtype)).contiguous()
        for name, tensor in checkpoint.tensors(getattr(torch, dtype))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eos = list(checkpoint.generation.eos_token_ids)
    _write_json(folder / "config.json", hf_config(checkpoint.spec, dtype) | {"eos_token_id": eos})
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, **checkpoint.generation.sampling})
    if checkpoint.tokenizer is not None:
        Tokenizer.load(checkpoint.tokenizer).hf.save_pretrained(folder)


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """What config.json says about a model of this shape."""
    rope: dict[str, Any] = {"rope_type": spec.rope_scaling, "rope_theta": spec.rope_theta}
    if spec.rope_scaling != "default":
        rope["factor"] = spec.rope_factor
    if spec.rope_scaling == "llama3":
        rope |= {
            "low_freq_factor": spec.rope_low_freq_factor,
            "high_freq_factor": spec.rope_high_freq_factor,
            "original_max_position_embeddings": spec.rope_original_max_position_embeddings,
        }
    return {
        "architectures": [spec.architecture],
        "model_type": MODEL_TYPES[spec.architecture],
        "dtype": dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": rope,
        "attention_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Exports what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--model", type=Path, help="GGUF file; default: the demo model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    export(open_checkpoint(args.model or find_demo_model()), args.folder, args.dtype)


if __name__ == "__main__":
    main()
