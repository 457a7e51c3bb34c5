// Row-wise kernels: embedding, RMSNorm, SiLU * mul.
#pragma once

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/quantize.inl.h"
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
    const auto value = [&](int i, int n) { return mul(mul(load_n(x + i, n), scale), load_n(p.weight + i, n)); };
    if (p.quantized.codes) {
      quantize_row(p.quantized, row, p.size, value);
      continue;
    }
    for (int i = 0; i < p.size; i += kLanes) {
      const int n = std::min(kLanes, p.size - i);
      store_as(p.out, p.out_dtype, row * p.size + i, value(i, n), n);
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

}  // namespace steploop::STEPLOOP_ISA
