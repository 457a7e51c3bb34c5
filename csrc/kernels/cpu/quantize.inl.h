// Rows to 8 bits: each group of elements by its own largest magnitude, so that a row's codes depend on nothing else.
#pragma once

#include <limits>

#include "kernels/cpu/simd.h"
#include "kernels/params.h"

namespace steploop::STEPLOOP_ISA {

inline constexpr float kLargestCode = 127.0f;
inline constexpr int32_t kInfinityBits = 0x7f800000;
inline constexpr float kSmallestMagnitude = 1e-30f;  // a group of less counts as zeros: its scale would be no number

inline constexpr int kRunVectors = static_cast<int>(QuantizedRows::kRowStep) / kLanes;

// Of each pair of lanes that are kStep apart, the sum and the difference.
template <int kStep>
SL_INLINE void rotate_lanes(Floats (&x)[kRunVectors]) {
  alignas(64) static constexpr auto kSigns = [] {
    struct {
      float at[kLanes];
    } signs{};
    for (int i = 0; i < kLanes; ++i) signs.at[i] = i & kStep ? -1.0f : 1.0f;
    return signs;
  }();
  for (Floats& v : x) v = fma(v, load(kSigns.at), swap_lanes<kStep>(v));
}

SL_INLINE void rotate_pair(Floats& low, Floats& high) {
  const Floats sum = add(low, high);
  high = sub(low, high);
  low = sum;
}

// Consecutive runs of `size` elements, a power of two, times a Hadamard matrix.
SL_INLINE void rotate(Floats (&x)[kRunVectors], int size) {
  if (size >= 2) rotate_lanes<1>(x);
  if (size >= 4) rotate_lanes<2>(x);
  if (size >= 8) rotate_lanes<4>(x);
  if (size >= 16) rotate_lanes<8>(x);
  if (size >= 32) {
    rotate_pair(x[0], x[1]);
    rotate_pair(x[2], x[3]);
  }
  if (size >= 64) {
    rotate_pair(x[0], x[2]);
    rotate_pair(x[1], x[3]);
  }
}

// What a group's values are multiplied with to become codes, 0 for nothing but zeros; and what a code stands for.
struct GroupScale {
  float inverse;
  float scale;
};

// norm: what the values are to be multiplied with besides.
SL_INLINE GroupScale group_scale(const Floats* x, int num_vectors, float norm) {
  Ints largest = magnitude_bits(x[0]);
  for (int v = 1; v < num_vectors; ++v) largest = max(largest, magnitude_bits(x[v]));
  const int32_t bits = reduce_max(largest);
  if (bits >= kInfinityBits) return {0.0f, std::numeric_limits<float>::quiet_NaN()};
  const float magnitude = __builtin_bit_cast(float, bits);
  if (magnitude < kSmallestMagnitude) return {0.0f, 0.0f};
  return {kLargestCode / magnitude, magnitude / kLargestCode * norm};
}

// Returns the sum of the codes.
SL_INLINE int32_t store_codes_of(const Floats* x, int num_vectors, float inverse, int8_t* codes) {
  const Floats factor = splat(inverse);
  Ints sums = splat_int(0);
  for (int v = 0; v < num_vectors; ++v) {
    const Ints part = inverse != 0.0f ? to_ints(mul(x[v], factor)) : splat_int(0);
    store_codes(codes + v * kLanes, part);
    sums = add(sums, part);
  }
  return reduce_add(sums);
}

// value(i, n): elements [i, i + n) of the row as Floats, zeros in the other lanes.
template <class Value>
void quantize_row(const QuantizedRows& out, int64_t row, int size, Value value) {
  const float norm = 1.0f / std::sqrt(static_cast<float>(out.rotation));
  int8_t* codes = out.codes + row * out.stride;
  RowGroup* group = out.groups + row * out.groups_stride;
  const int num_vectors = out.group_size / kLanes;
  Floats x[kMaxInputGroup / kLanes];
  for (int first = 0; first < size; first += out.group_size) {
    for (int run = 0; run < num_vectors; run += kRunVectors) {
      Floats(&values)[kRunVectors] = *reinterpret_cast<Floats(*)[kRunVectors]>(x + run);
#pragma GCC unroll 4
      for (int v = 0; v < kRunVectors; ++v) {
        const int at = (run + v) * kLanes, left = std::min(out.group_size - at, size - first - at);
        values[v] = left > 0 ? value(first + at, std::min(kLanes, left)) : zero();
      }
      if (out.rotation > 1) rotate(values, out.rotation);
    }
    const GroupScale scale = group_scale(x, num_vectors, norm);
    if (out.format == Quantization::kInt4) {
      constexpr int kVectors = static_cast<int>(kInt4Group) / kLanes;
      for (int v = 0; v < num_vectors; v += kVectors, codes += kInt4Group) {
        const auto sum = static_cast<float>(store_codes_of(x + v, kVectors, scale.inverse, codes));
        *group++ = {scale.scale, __builtin_bit_cast(int32_t, sum* scale.scale)};
      }
    } else {
      *group++ = {scale.scale, -kInt8Offset * store_codes_of(x, num_vectors, scale.inverse, codes)};
      codes += out.group_size;
    }
  }
}

inline void quantize_rows(const QuantizeRowsParams& p, int64_t row_begin, int64_t row_end) {
  const auto each = [&](const auto* x) {
    for (int64_t row = row_begin; row < row_end; ++row)
      quantize_row(p.out, row, p.size, [&](int i, int n) { return load_n(x + row * p.size + i, n); });
  };
  if (p.dtype == DType::kFloat32)
    each(static_cast<const float*>(p.x));
  else
    each(static_cast<const bf16*>(p.x));
}

}  // namespace steploop::STEPLOOP_ISA
