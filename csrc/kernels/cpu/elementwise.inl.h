// Row-wise kernels: embedding, RMSNorm, SiLU * mul, and rotary embedding with the KV write.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/simd.h"

namespace steploop::STEPLOOP_ISA {

inline void embedding(const EmbeddingParams& p, const void* table, DType table_dtype, int64_t row_begin,
                      int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t source = static_cast<int64_t>(p.token_ids[row]) * p.hidden_size;
    float* out = p.out + row * p.hidden_size;
    for (int i = 0; i < p.hidden_size; i += kLanes) {
      const int n = std::min(kLanes, p.hidden_size - i);
      store_n(out + i,
              table_dtype == DType::kFloat32 ? load_n(static_cast<const float*>(table) + source + i, n)
                                             : load_n(static_cast<const bf16*>(table) + source + i, n),
              n);
    }
  }
}

// 1 / sqrt(mean(x^2) + eps), summed in four interleaved chains of 16 lanes: an order fixed by `size` alone.
SL_INLINE float inverse_rms(const float* x, int size, float eps) {
  Floats sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const Floats v = load(x + i + u * kLanes);
      sums[u] = fma(v, v, sums[u]);
    }
  for (; i < size; i += kLanes) {
    const Floats v = load_n(x + i, std::min(kLanes, size - i));
    sums[0] = fma(v, v, sums[0]);
  }
  const float total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

inline void rms_norm(const RmsNormParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* x = p.x + row * p.size;
    if (p.residual)
      for (int i = 0; i < p.size; ++i) x[i] += p.residual[row * p.size + i];
    const Floats scale = splat(inverse_rms(x, p.size, p.eps));
    for (int i = 0; i < p.size; i += kLanes) {
      const int n = std::min(kLanes, p.size - i);
      const Floats value = mul(mul(load_n(x + i, n), scale), load_n(p.weight + i, n));
      store_as(p.out, p.out_dtype, row * p.size + i, value, n);
    }
  }
}

inline void silu_mul(const SiluMulParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* gate = p.gate_up + row * 2 * p.size;
    for (int i = 0; i < p.size; i += kLanes) {
      const int n = std::min(kLanes, p.size - i);
      const Floats value = mul(silu(load_n(gate + i, n)), load_n(gate + p.size + i, n));
      store_as(p.out, p.out_dtype, row * p.size + i, value, n);
    }
  }
}

// Optional per-head RMSNorm, then rotation of (x[i], x[i + half]) by the position's angle i. head: float32 [head_dim].
SL_INLINE void norm_and_rotate(float* out, const float* head, int head_dim, const float* norm, float eps,
                               const float* cos, const float* sin) {
  const int half = head_dim / 2;
  const Floats scale = splat(norm ? inverse_rms(head, head_dim, eps) : 1.0f);
  for (int i = 0; i < half; i += kLanes) {
    const int n = std::min(kLanes, half - i);
    Floats low = load_n(head + i, n), high = load_n(head + half + i, n);
    if (norm) {
      low = mul(mul(low, scale), load_n(norm + i, n));
      high = mul(mul(high, scale), load_n(norm + half + i, n));
    }
    const Floats c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, sub(mul(low, c), mul(high, s)), n);
    store_n(out + half + i, add(mul(high, c), mul(low, s)), n);
  }
}

inline constexpr int kMaxHeadDim = 256;

// A head's key or value in the KV dtype.
union HeadElements {
  float f32[kMaxHeadDim];
  bf16 b16[kMaxHeadDim];
};

SL_INLINE void convert_head(void* out, const float* head, int head_dim, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, head, static_cast<size_t>(head_dim) * 4);
    return;
  }
  for (int i = 0; i < head_dim; i += kLanes) {
    const int n = std::min(kLanes, head_dim - i);
    store_n(static_cast<bf16*>(out) + i, load_n(head + i, n), n);
  }
}

inline void rope_kv_write(const RopeKvWriteParams& p, int64_t row_begin, int64_t row_end) {
  const KvLayout layout(p.kv);
  const int head_dim = p.kv.head_dim, num_kv_heads = p.kv.num_kv_heads, half = head_dim / 2;
  const int words = head_dim / layout.per_word;
  const int64_t qkv_width = static_cast<int64_t>(p.num_heads + 2 * num_kv_heads) * head_dim;
  const int64_t element_bytes = static_cast<int64_t>(dtype_size(p.kv.dtype));
  alignas(64) float rotated[kMaxHeadDim];
  alignas(64) HeadElements converted;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* qkv = p.qkv + row * qkv_width;
    const float* cos = p.cos + static_cast<int64_t>(p.positions[row]) * half;
    const float* sin = p.sin + static_cast<int64_t>(p.positions[row]) * half;
    char* q = static_cast<char*>(p.q) + row * p.num_heads * head_dim * element_bytes;
    for (int h = 0; h < p.num_heads; ++h) {
      norm_and_rotate(rotated, qkv + h * head_dim, head_dim, p.q_norm, p.norm_eps, cos, sin);
      convert_head(q + h * head_dim * element_bytes, rotated, head_dim, p.kv.dtype);
    }
    const BlockId block = static_cast<BlockId>(p.slot_mapping[row] / p.kv.block_size);
    const int32_t token = static_cast<int32_t>(p.slot_mapping[row] % p.kv.block_size);
    for (int h = 0; h < num_kv_heads; ++h) {
      char* cache = kv_head(p.kv, block, h);
      const float* k = qkv + (p.num_heads + h) * head_dim;
      norm_and_rotate(rotated, k, head_dim, p.k_norm, p.norm_eps, cos, sin);
      convert_head(&converted, rotated, head_dim, p.kv.dtype);
      char* keys = cache + layout.key_word(token, 0);
      const int64_t key_stride = layout.group_tokens * 4;
      for (int w = 0; w < words; ++w)
        std::memcpy(keys + w * key_stride, reinterpret_cast<const char*>(&converted) + w * 4, 4);
      const float* v = qkv + (p.num_heads + num_kv_heads + h) * head_dim;
      char* values = cache + layout.value_element(token, 0);
      if (p.kv.dtype == DType::kFloat32) {
        std::memcpy(values, v, static_cast<size_t>(head_dim) * 4);
      } else {  // every second element: the other token of the pair may belong to another thread
        convert_head(&converted, v, head_dim, p.kv.dtype);
        for (int i = 0; i < head_dim; ++i) std::memcpy(values + i * 4, &converted.b16[i], 2);
      }
    }
  }
}

}  // namespace steploop::STEPLOOP_ISA
