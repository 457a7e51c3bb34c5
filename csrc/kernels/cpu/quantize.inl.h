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

// One group, of so many vectors: x to codes. norm: what its values are to be multiplied with.
SL_INLINE RowGroup quantize_group(const Floats* x, int count, float norm, Quantization format, int8_t* codes) {
  Ints largest = magnitude_bits(x[0]);
  for (int v = 1; v < count; ++v) largest = max(largest, magnitude_bits(x[v]));
  const int32_t bits = reduce_max(largest);
  const float magnitude = __builtin_bit_cast(float, bits);
  const bool usable = bits < kInfinityBits && magnitude >= kSmallestMagnitude;
  const Floats inverse = splat(usable ? kLargestCode / magnitude : 0.0f);
  Ints sums = splat_int(0);
  for (int v = 0; v < count; ++v) {
    const Ints part = usable ? to_ints(mul(x[v], inverse)) : splat_int(0);
    store_codes(codes + v * kLanes, part);
    sums = add(sums, part);
  }
  const int32_t sum = reduce_add(sums);
  RowGroup group;
  group.scale = bits >= kInfinityBits ? std::numeric_limits<float>::quiet_NaN()
                : usable              ? magnitude / kLargestCode * norm
                                      : 0.0f;
  group.term = format == Quantization::kInt4 ? __builtin_bit_cast(int32_t, group.scale* static_cast<float>(sum))
                                             : -kInt8Offset * sum;
  return group;
}

// value(i, n): elements [i, i + n) of the row as Floats, zeros in the other lanes.
template <class Value>
void quantize_row(const QuantizedRows& out, int64_t row, int size, Value value) {
  const float norm = 1.0f / std::sqrt(static_cast<float>(out.rotation));
  int8_t* codes = out.codes + row * out.stride;
  RowGroup* group = out.groups + row * out.groups_stride;
  constexpr auto kStep = static_cast<int>(QuantizedRows::kRowStep);
  for (int first = 0; first < size; first += kStep, codes += kStep) {
    Floats x[kRunVectors];
    for (int v = 0; v < kRunVectors; ++v) {
      const int i = first + v * kLanes;
      x[v] = i < size ? value(i, std::min(kLanes, size - i)) : zero();
    }
    if (out.rotation > 1) rotate(x, out.rotation);
    if (out.format == Quantization::kInt4) {
      constexpr int kVectors = static_cast<int>(kInt4Group) / kLanes;
      for (int v = 0; v < kRunVectors; v += kVectors)
        *group++ = quantize_group(x + v, kVectors, norm, out.format, codes + v * kLanes);
    } else {
      *group++ = quantize_group(x, kRunVectors, norm, out.format, codes);
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
