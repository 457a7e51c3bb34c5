"""The kernels as torch operators, for tests and for other people's models: `torch.ops.steploop.*` on the CPU and
`torch.ops.steploop_cuda.*` on a GPU.

Importing this module loads them. All tensors are contiguous and, for `torch.ops.steploop`, on the CPU; a wrong dtype,
shape or stride raises `RuntimeError` saying what must hold. Shapes, with `[...]` for any number of leading dimensions:

- `embedding(token_ids int32 [tokens], table [vocab, size])` -> float32 [tokens, size]
- `rms_norm(x float32 [..., size], weight float32 [size], eps, out_dtype=None)` -> [..., size]
- `add_rms_norm(x, residual, weight, eps, out_dtype=None)`: adds `residual` to `x` in place, then the same
- `silu_and_mul(gate_up float32 [..., 2 * size], out_dtype=None)` -> [..., size]
- `log_softmax(logits float32 [..., vocab])` -> [..., vocab]; NaN throughout for a row with NaN or +inf
- `argmax(logits float32 [..., vocab])` -> int64 [...], ties to the lowest index; -1 for a row with NaN or +inf
- `pack_linear(weight [out, in], bias float32 [out] or None)`, `pack_gate_up(gate [size, in], up [size, in])` -> uint8:
  the weight in the order the kernels read it. To be handed on as it is: a copy of the tensor cannot be used
- `pack_quantized_linear(codes [out, in], scales, minimums=None, bias float32 [out] or None, gate_up=False)`: the same
  for a weight in 8 bits (codes int8, scales float32 [out, groups of input_group]: scale * code) or in 4 (codes uint8 of
  0..15, scales and minimums float16 [out, in / 32]: scale * code + minimum). gate_up: the first half of the rows is the
  gate
- `quantize_rows(x [..., in], int4=False, rotate=False)` -> int8 [..., in], float32 [..., groups]: what a layer with a
  weight in 8 (or 4) bits makes of its input, which is float32 or bfloat16: of each group of
  `steploop.weights.quantize.input_group`, the nearest of 255 multiples of its largest magnitude / 127. rotate: of the
  rows as `steploop.weights.quantize.rotate` turns them
- `linear(x [..., in], packed, out, rotate=False)` -> float32 [..., out]; rotate: as `quantize_rows` has it.
  `add_linear(out float32 [..., out], x, packed)` adds to out
- `linear_silu_and_mul(x [..., in], packed, size)` -> [..., size] of x's dtype, with a weight from `pack_gate_up`
- `rope_kv_write(qkv float32 [tokens, (heads + 2 * kv_heads) * head_dim], positions int32 [tokens],
  cos, sin float32 [positions, head_dim / 2], slot_mapping int64 [tokens], kv_cache, heads, q_norm=None, k_norm=None,
  norm_eps=1e-6)` -> q [tokens, heads, head_dim] of the cache's dtype; writes k and v to the cache.
  A slot is block * block_size + offset
- `kv_write(key, value [tokens, kv_heads, head_dim], slot_mapping, kv_cache)` and
  `kv_read(kv_cache, slot_mapping)` -> key, value: plain copies in and out
- `paged_attention(q [tokens, heads, head_dim], kv_cache, block_tables int32 [sequences, blocks],
  cu_seqlens_q int32 [sequences + 1], seq_lens int32 [sequences], scale, out_dtype=None, target_items=0,
  max_partial_rows=0)` -> [tokens, heads, head_dim]. Causal: the last query token of a sequence is the last of its
  seq_lens tokens. The last two arguments say how work is cut up, and change no bit of the result

`out_dtype` is float32 (the default) or bfloat16; so are weights, the cache (see `new_kv_cache`), and what is computed
with them. A cache may be int8 as well, each token's key and value of each head with a scale of its own: 127 times that
is their largest magnitude. What goes in and out of such a cache, and the queries, are float32.

`torch.ops.steploop_cuda` wants a torch with CUDA and a build of steploop with its CUDA backend. All tensors are on one
CUDA device unless said otherwise, work goes to torch's current stream, and ids, positions, slots and block tables are
not checked: that would wait for the device. Half means bfloat16 or float16; sizes of rows are multiples of 8.

- `embedding`, `rms_norm`, `add_rms_norm` as above, with any `out_dtype`; `gather_rows(x float32 [rows, size],
  rows int32 [n])` -> [n, size]; `silu_and_mul(gate_up, out_dtype=None, group=0)`, whose columns are runs of `group` of
  gate and as many of up, or one run of each
- `linear(x half [..., in], weight [out, in], bias float32 [out] or None)` -> float32 [..., out];
  `add_linear(out float32, x, weight, bias)` adds to out; `linear_silu_and_mul(x, gate_up [2 * size, in])` ->
  [..., size] of x's dtype, with rows 8 of gate, 8 of up and so on. Weights are not packed. A row's result is the same
  bits whatever the other rows
- `rope_kv_write` as above, with a half cache [blocks, kv_heads, 2 (keys, values), block_size, head_dim] in plain order
- `paged_attention(q, kv_cache, block_tables, cu_seqlens_q, seq_lens, scale, small_rows=16, target_items=0,
  max_partial_rows=0)` -> [tokens, heads, head_dim] of q's dtype, with `cu_seqlens_q` and `seq_lens` on the CPU. The
  last three say how work is cut up, and change no bit of the result
- `transfer_blocks(src, dst, pairs int32 [n, 2])`: block pairs[i][1] of dst = block pairs[i][0] of src; one of them may
  be in pinned memory of the host, which the caller then keeps as it is until the stream has come that far
- `sample(logits float32 [rows, vocab], temperature float64, top_k int32, top_p float64, seed int64,
  sample_index int32, position int64, want_logprob=False, masked_tokens=None)` -> tokens int32, logprobs float32,
  failed int32, each [rows]. The six in the middle are on the CPU, one value a row; `masked_tokens` int32 [rows, n] too:
  ids that may not come, -1 for none
- `linear_epilogue(product half [rows, out], bias, out, epilogue)` and `matmul_address()` serve the engine where
  products are torch's own
"""

from __future__ import annotations

from pathlib import Path

import torch

from steploop.weights.quantize import input_group

torch.ops.load_library(str(Path(__file__).with_name("libsteploop_ops.so")))


KV_SCALE_BYTES = 4
"""Of a token's key or value of one head, in a KV cache of int8."""


def new_kv_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """A KV cache of one layer: [num_blocks, num_kv_heads, 2, block_size, head_dim], zeroed.

    Of int8 the last dimension is head_dim + 4, for the scales. The order within the last three dimensions belongs to
    the kernels.
    """
    scale_bytes = KV_SCALE_BYTES if dtype == torch.int8 else 0
    return torch.zeros(num_blocks, num_kv_heads, 2, block_size, head_dim + scale_bytes, dtype=dtype)


# What each operator returns, for torch.compile and other tracing: shapes without values.


@torch.library.register_fake("steploop::embedding")
def _(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.new_empty((token_ids.shape[0], table.shape[1]), dtype=torch.float32)


@torch.library.register_fake("steploop::rms_norm")
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(x, dtype=out_dtype)


@torch.library.register_fake("steploop::add_rms_norm")
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.empty_like(x, dtype=out_dtype)


@torch.library.register_fake("steploop::silu_and_mul")
def _(gate_up: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=out_dtype)


@torch.library.register_fake("steploop::log_softmax")
def _(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


@torch.library.register_fake("steploop::argmax")
def _(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


@torch.library.register_fake("steploop::quantize_rows")
def _(x: torch.Tensor, int4: bool = False, rotate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    num_groups = -(-x.shape[-1] // input_group(x.shape[-1], int4=int4))
    return torch.empty_like(x, dtype=torch.int8), x.new_empty((*x.shape[:-1], num_groups), dtype=torch.float32)


@torch.library.register_fake("steploop::linear")
def _(x: torch.Tensor, packed: torch.Tensor, out_features: int, rotate: bool = False) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=torch.float32)


@torch.library.register_fake("steploop::add_linear")
def _(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor) -> None:
    return None


@torch.library.register_fake("steploop::linear_silu_and_mul")
def _(x: torch.Tensor, packed: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], size))


def _empty_heads(kv_cache: torch.Tensor, num_tokens: int, num_heads: int) -> torch.Tensor:
    """Queries, keys or values beside a KV cache."""
    if kv_cache.dtype != torch.int8:
        return kv_cache.new_empty((num_tokens, num_heads, kv_cache.shape[4]))
    return kv_cache.new_empty((num_tokens, num_heads, kv_cache.shape[4] - KV_SCALE_BYTES), dtype=torch.float32)


@torch.library.register_fake("steploop::rope_kv_write")
def _(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    return _empty_heads(kv_cache, qkv.shape[0], num_heads)


@torch.library.register_fake("steploop::kv_write")
def _(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    return None


@torch.library.register_fake("steploop::kv_read")
def _(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_kv_heads = slot_mapping.shape[0], kv_cache.shape[1]
    return _empty_heads(kv_cache, num_tokens, num_kv_heads), _empty_heads(kv_cache, num_tokens, num_kv_heads)


@torch.library.register_fake("steploop::paged_attention")
def _(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype | None = None,
    target_items: int = 0,
    max_partial_rows: int = 0,
) -> torch.Tensor:
    return torch.empty_like(q, dtype=out_dtype or torch.float32)


__all__ = ["new_kv_cache"]
