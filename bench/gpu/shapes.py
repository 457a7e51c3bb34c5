"""Models that are measured, by their shapes alone, and the requests that they serve."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from workload import Request, make_workload


@dataclass(frozen=True)
class Plan:
    """What one model is measured at."""

    name: str
    config: dict[str, Any]
    """Arguments of ModelConfig."""
    batches: tuple[int, ...] = (1, 32, 128)
    prompt_tokens: int = 128
    num_steps: int = 32
    """Decode steps that are timed, after num_warm_up_steps."""
    num_warm_up_steps: int = 4
    num_requests: int = 64
    max_output: int = 256
    max_prompt: int = 256
    num_slots: int = 16
    """Sequences at once in the workload: a quarter of its requests, so that a static batch is seen to wait."""

    def requests(self) -> list[Request]:
        """A workload whose output lengths have a long tail: 4 to 256 tokens, exponential, 59 on average."""
        vocab_size = self.config["vocab_size"]
        requests = make_workload(
            "mixed", num_requests=self.num_requests, max_output=self.max_output, vocab_size=min(vocab_size, 49152)
        )
        return [Request(r.prompt_token_ids[: self.max_prompt], r.num_output_tokens) for r in requests]


LLAMA_3_8B = Plan(
    "llama_3_8b",
    {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
)
SMOLLM2_135M = Plan(
    "smollm2_135m",
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
)
TINY = Plan(
    "tiny",
    {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
    batches=(1, 3),
    prompt_tokens=9,
    num_steps=2,
    num_warm_up_steps=1,
    num_requests=4,
    max_output=6,
    max_prompt=12,
    num_slots=2,
)
PLANS = {plan.name: plan for plan in (LLAMA_3_8B, SMOLLM2_135M, TINY)}


def read_weight_bytes(config: dict[str, Any], weight_bytes: int) -> int:
    """What a decode step must read of a model's bfloat16 weights: not the embeddings of tokens that are not there."""
    if config.get("tie_word_embeddings"):
        return weight_bytes
    return weight_bytes - 2 * int(config["vocab_size"]) * int(config["hidden_size"])
