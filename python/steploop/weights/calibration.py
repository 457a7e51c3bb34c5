"""How large the inputs of a model's linear layers are: a plain forward pass over random tokens, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from steploop.weights.spec import ModelSpec

NUM_TOKENS = 512
"""Length of the random text: enough for every channel's magnitude, and no text has to be chosen."""

Linear = Callable[["str", "torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
"""linear(name, x, weight, bias): a layer's "self_attn.q_proj" and so on, applied to x [tokens, in_features]."""


class Calibration:
    """Takes a random text through the layers as they are read, and measures what each linear layer is given.

    Args:
        embedding: [vocab_size, hidden_size].
    """

    def __init__(self, spec: ModelSpec, embedding: torch.Tensor) -> None:
        import torch

        self._spec = spec
        num_tokens = min(NUM_TOKENS, spec.max_position_embeddings)
        random = torch.Generator().manual_seed(0)
        self._x = embedding[torch.randint(len(embedding), (num_tokens,), generator=random)].float()

    def next_layer(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The root of the mean square of each input channel, float32 [in_features], by the linear layer's name.

        Args:
            tensors: The layer's, in float32, under their names without "model.layers.N.".
        """
        import torch

        magnitudes: dict[str, torch.Tensor] = {}

        def measured(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            magnitudes[name] = root_mean_square(x)
            return torch.nn.functional.linear(x, weight, bias)

        self._x = decoder_layer(self._spec, tensors, self._x, measured)
        return magnitudes


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Of each column."""
    return x.square().mean(0).sqrt()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, over the last dimension."""
    import torch

    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def decoder_layer(
    spec: ModelSpec, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, linear: Linear
) -> torch.Tensor:
    """One layer over one text, x [tokens, hidden_size], in x's type; the reference of what the native core computes.

    The rotary embedding is the plain one, whatever `rope_scaling` says: scaling changes long distances only.
    """
    import torch

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(name, x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    num_tokens = len(x)
    h = rms_norm(x, tensors["input_layernorm.weight"], spec.rms_norm_eps)
    q, k, v = (project(f"self_attn.{name}_proj", h).view(num_tokens, -1, spec.head_dim) for name in "qkv")
    if spec.qk_norm:
        q = rms_norm(q, tensors["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = rms_norm(k, tensors["self_attn.k_norm.weight"], spec.rms_norm_eps)
    frequencies = spec.rope_theta ** (-torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), frequencies).repeat(1, 2)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat((-high, low), -1) * sin

    attended = torch.nn.functional.scaled_dot_product_attention(
        rotate(q).transpose(0, 1)[None],
        rotate(k).transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        scale=1 / math.sqrt(spec.head_dim),
        enable_gqa=True,
    )
    x = x + project("self_attn.o_proj", attended[0].transpose(0, 1).reshape(num_tokens, -1))
    h = rms_norm(x, tensors["post_attention_layernorm.weight"], spec.rms_norm_eps)
    inner = torch.nn.functional.silu(project("mlp.gate_proj", h)) * project("mlp.up_proj", h)
    return x + project("mlp.down_proj", inner)
