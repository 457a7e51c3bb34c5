// Rotary embedding with the KV write: projected rows become queries, and keys and values in the cache.
#pragma once

#include "kernels/cpu/elementwise.inl.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/quantize.inl.h"
#include "kernels/cpu/simd.h"

namespace steploop::STEPLOOP_ISA {

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

SL_INLINE void convert_head(void* out, const float* head, int head_dim, DType dtype) {
  for (int i = 0; i < head_dim; i += kLanes) store_as(out, dtype, i, load(head + i));
}

// A head's key or value as the cache holds it.
struct StoredHead {
  alignas(64) char elements[kMaxHeadDim * sizeof(float)];
  float scale;  // of int8

  SL_INLINE void convert(const float* head, int head_dim, DType dtype) {
    if (dtype != DType::kInt8) return convert_head(elements, head, head_dim, dtype);
    auto* codes = reinterpret_cast<int8_t*>(elements);
    Floats x[kMaxHeadDim / kLanes];
    for (int i = 0; i < head_dim; i += kLanes) x[i / kLanes] = load(head + i);
    const GroupScale group = group_scale(x, head_dim / kLanes, 1.0f);
    store_codes_of(x, head_dim / kLanes, group.inverse, codes);
    scale = group.scale;
    for (int i = 0; i < head_dim; ++i) codes[i] = static_cast<int8_t>(codes[i] ^ 0x80);  // plus 128
  }
};

class KvWriter {
 public:
  KvWriter(const KvCacheView& kv, int64_t slot)
      : kv_(kv),
        layout_(kv),
        block_(static_cast<BlockId>(slot / kv.block_size)),
        token_(static_cast<int32_t>(slot % kv.block_size)) {}

  void write(int32_t kv_head_index, const float* key, const float* value) const {
    char* cache = kv_head(kv_, block_, kv_head_index);
    StoredHead head;
    head.convert(key, kv_.head_dim, kv_.dtype);
    char* keys = cache + layout_.key_word(token_, 0);
    const int words = kv_.head_dim / layout_.per_word;
    for (int w = 0; w < words; ++w) std::memcpy(keys + w * layout_.group_tokens * 4, head.elements + w * 4, 4);
    if (kv_.dtype == DType::kInt8) std::memcpy(cache + layout_.key_scale(token_), &head.scale, 4);

    head.convert(value, kv_.head_dim, kv_.dtype);
    char* values = cache + layout_.value_element(token_, 0);
    // One element of each word: its others, of other tokens, may belong to other threads.
    switch (layout_.element_bytes) {
      case 4: std::memcpy(values, head.elements, static_cast<size_t>(kv_.head_dim) * 4); break;
      case 2: scatter<2>(values, head); break;
      default: scatter<1>(values, head); break;
    }
    if (kv_.dtype == DType::kInt8) std::memcpy(cache + layout_.value_scale(token_), &head.scale, 4);
  }

 private:
  template <int kBytes>
  void scatter(char* values, const StoredHead& head) const {
    for (int i = 0; i < kv_.head_dim; ++i) std::memcpy(values + i * 4, head.elements + i * kBytes, kBytes);
  }

  const KvCacheView& kv_;
  const KvLayout layout_;
  const BlockId block_;
  const int32_t token_;
};

inline void rope_kv_write(const RopeKvWriteParams& p, int64_t row_begin, int64_t row_end) {
  const int head_dim = p.kv.head_dim, num_kv_heads = p.kv.num_kv_heads, half = head_dim / 2;
  const int64_t qkv_width = static_cast<int64_t>(p.num_heads + 2 * num_kv_heads) * head_dim;
  const DType q_dtype = query_dtype(p.kv.dtype);
  const int64_t q_bytes = head_dim * static_cast<int64_t>(dtype_size(q_dtype));
  alignas(64) float rotated[kMaxHeadDim];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* qkv = p.qkv + row * qkv_width;
    const float* cos = p.cos + static_cast<int64_t>(p.positions[row]) * half;
    const float* sin = p.sin + static_cast<int64_t>(p.positions[row]) * half;
    char* q = static_cast<char*>(p.q) + row * p.num_heads * q_bytes;
    for (int h = 0; h < p.num_heads; ++h) {
      norm_and_rotate(rotated, qkv + h * head_dim, head_dim, p.q_norm, p.norm_eps, cos, sin);
      convert_head(q + h * q_bytes, rotated, head_dim, q_dtype);
    }
    const KvWriter writer(p.kv, p.slot_mapping[row]);
    const float* keys = qkv + static_cast<ptrdiff_t>(p.num_heads) * head_dim;
    const float* values = keys + static_cast<ptrdiff_t>(num_kv_heads) * head_dim;
    for (int h = 0; h < num_kv_heads; ++h) {
      norm_and_rotate(rotated, keys + h * head_dim, head_dim, p.k_norm, p.norm_eps, cos, sin);
      writer.write(h, rotated, values + h * head_dim);
    }
  }
}

}  // namespace steploop::STEPLOOP_ISA
