"""Models to simulate: how much a step reads and computes for each of their tokens."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steploop.checks import checked_int
from steploop.errors import InvalidArgumentError, SteploopError
from steploop.weights.spec import ModelSpec
from steploop.workload.specs import unknown_name

WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 5.0}
"""With the scales of a quantised weight, as steploop's own formats have them."""
KV_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 9}
"""Of a key's or value's element; int8 with its scales, rounded up."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that its costs come from.

    Raises:
        InvalidArgumentError: a size that is no integer >= 1.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    num_mlp_matrices: int = 3
    """Of hidden_size * intermediate_size weights: gate, up and down; 2: the older form without a gate."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int":
                checked_int(f"{field.name} of {self.name}", getattr(self, field.name), low=1)

    @property
    def num_linear_parameters(self) -> int:
        """Of the linear layers: what every token is multiplied with."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + self.num_mlp_matrices * self.hidden_size * self.intermediate_size)

    @property
    def num_output_parameters(self) -> int:
        """Of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of linear layers, output layer and embedding."""
        return self.num_linear_parameters + self.num_output_parameters * (1 if self.tie_word_embeddings else 2)

    @property
    def num_kv_elements_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flops_per_pair(self) -> int:
        """Of one query with one key and its value, all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


# Sizes as in the models' papers and configurations: OPT (Zhang et al. 2022, table 1), GPT-3 (Brown et al. 2020, table
# 2.1), Llama 3 (Grattafiori et al. 2024, table 3).
MODELS = {
    model.name: model
    for model in (
        ModelShape(
            name="opt-13b",
            num_layers=40,
            hidden_size=5120,
            intermediate_size=20480,
            num_heads=40,
            num_kv_heads=40,
            head_dim=128,
            vocab_size=50272,
            max_model_len=2048,
            num_mlp_matrices=2,
            tie_word_embeddings=True,
        ),
        ModelShape(
            name="llama-3-8b",
            num_layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_model_len=8192,
        ),
        ModelShape(
            name="llama-3-70b",
            num_layers=80,
            hidden_size=8192,
            intermediate_size=28672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_model_len=8192,
        ),
        ModelShape(
            name="gpt3-175b",
            num_layers=96,
            hidden_size=12288,
            intermediate_size=49152,
            num_heads=96,
            num_kv_heads=96,
            head_dim=128,
            vocab_size=50257,
            max_model_len=2048,
            num_mlp_matrices=2,
            tie_word_embeddings=True,
        ),
    )
}


def shape_of(name: str, spec: ModelSpec) -> ModelShape:
    """The shape of a model that the engine can load."""
    return ModelShape(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_model_len=spec.default_max_len,
        tie_word_embeddings=spec.tie_word_embeddings,
    )


def find_model(name: str) -> ModelShape:
    """A preset by its name, or the model that a folder, a config.json or a GGUF file describes. Weights are not read.

    Raises:
        InvalidArgumentError: there is none of that name; with the presets and the nearest.
        SteploopError: a file that cannot be read, or a model that the engine does not know.
    """
    if preset := MODELS.get(name.lower()):
        return preset
    path = Path(name)
    if path.suffix == ".json" and os.path.isfile(path):
        return shape_of(name, _spec_of_config(path))
    if os.path.exists(path):  # which is False where a name cannot be one
        from steploop.weights import open_checkpoint

        return shape_of(name, open_checkpoint(path).spec)
    raise unknown_name("MODEL", name, [*MODELS, "a folder, config.json or GGUF file"])


def _spec_of_config(path: Path) -> ModelSpec:
    from steploop.weights.hf_config import parse_hf_config

    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{path} must hold a JSON object")
    try:
        return parse_hf_config(config)
    except SteploopError as error:
        raise type(error)(f"{path}: {error}") from None
