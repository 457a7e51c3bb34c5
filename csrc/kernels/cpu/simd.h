// Sixteen float lanes, for the instruction set this file is compiled for. Kernels are written once over these and
// compiled once per instruction set, each into its own namespace.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/types.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define STEPLOOP_ISA avx512
#define STEPLOOP_ISA_AVX512 1
#else
#define STEPLOOP_ISA portable
#define STEPLOOP_ISA_AVX512 0
#endif

#define SL_INLINE inline __attribute__((always_inline))

namespace steploop::STEPLOOP_ISA {

inline constexpr int kLanes = 16;

#if STEPLOOP_ISA_AVX512

using Floats = __m512;
using Words = __m512i;  // 16 float32, or 16 pairs of bfloat16

SL_INLINE Floats zero() { return _mm512_setzero_ps(); }
SL_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
SL_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
SL_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
SL_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }  // 0 <= n <= 16
SL_INLINE Floats load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
SL_INLINE void store_n(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
SL_INLINE Floats load(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
SL_INLINE Floats load_n(const bf16* p, int n) {
  const __m256i raw = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
SL_INLINE void store(bf16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
SL_INLINE void store_n(bf16* p, Floats x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
SL_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
SL_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
SL_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
SL_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
SL_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
SL_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
SL_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
SL_INLINE Floats keep_first(Floats x, int n, Floats other) { return _mm512_mask_mov_ps(other, first_lanes(n), x); }
SL_INLINE float reduce_add(Floats x) { return _mm512_reduce_add_ps(x); }
SL_INLINE float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }
SL_INLINE Floats round_nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
SL_INLINE Floats scale_by_power(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }  // x * 2^power

SL_INLINE Words load_words(const char* p) { return _mm512_loadu_si512(p); }
SL_INLINE Words splat_word(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
struct Float32Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, Words a, Words b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
  }
};
struct BFloat16Dot {
  using Element = bf16;
  static SL_INLINE Floats step(Floats acc, Words a, Words b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
SL_INLINE void prefetch_l1(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
SL_INLINE void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

#else  // portable: GCC and Clang vector extensions, lowered to what the baseline has

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

SL_INLINE Floats zero() { return Floats{}; }
SL_INLINE Floats splat(float x) { return Floats{} + x; }
SL_INLINE Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SL_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
SL_INLINE Floats load_n(const float* p, int n) {
  Floats x{};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
SL_INLINE void store_n(float* p, Floats x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
SL_INLINE Floats load_n(const bf16* p, int n) {
  Floats x{};
  for (int i = 0; i < n; ++i) x[i] = bf16_to_float(p[i]);
  return x;
}
SL_INLINE Floats load(const bf16* p) { return load_n(p, kLanes); }
SL_INLINE void store_n(bf16* p, Floats x, int n) {
  for (int i = 0; i < n; ++i) p[i] = float_to_bf16(x[i]);
}
SL_INLINE void store(bf16* p, Floats x) { store_n(p, x, kLanes); }
SL_INLINE Floats add(Floats a, Floats b) { return a + b; }
SL_INLINE Floats sub(Floats a, Floats b) { return a - b; }
SL_INLINE Floats mul(Floats a, Floats b) { return a * b; }
SL_INLINE Floats div(Floats a, Floats b) { return a / b; }
SL_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
SL_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
SL_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
SL_INLINE Floats keep_first(Floats x, int n, Floats other) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < n ? x : other;
}
template <class Op>
SL_INLINE float reduce(Floats x, Op op) {  // halves onto halves
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = op(x[i], x[i + width]);
  return x[0];
}
SL_INLINE float reduce_add(Floats x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
SL_INLINE float reduce_max(Floats x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
SL_INLINE Floats round_nearest(Floats x) {  // |x| < 2^22
  const Floats magic = splat(12582912.0f);
  return (x + magic) - magic;
}
SL_INLINE Floats scale_by_power(Floats x, Floats power) {  // in two halves, so that subnormals come out
  const Ints p = __builtin_convertvector(max(min(power, splat(252.0f)), splat(-252.0f)), Ints);
  const Ints half = p >> 1;
  return x * reinterpret_cast<Floats>((half + 127) << 23) * reinterpret_cast<Floats>((p - half + 127) << 23);
}

SL_INLINE Words load_words(const char* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SL_INLINE Words splat_word(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return Words{} + word;
}
struct Float32Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, Words a, Words b) {
    return reinterpret_cast<Floats>(a) * reinterpret_cast<Floats>(b) + acc;
  }
};
struct BFloat16Dot {
  using Element = bf16;
  static SL_INLINE Floats step(Floats acc, Words a, Words b) {
    const Words high = Words{} + 0xffff0000u;
    acc = reinterpret_cast<Floats>(a << 16) * reinterpret_cast<Floats>(b << 16) + acc;
    return reinterpret_cast<Floats>(a & high) * reinterpret_cast<Floats>(b & high) + acc;
  }
};
SL_INLINE void prefetch_l1(const char* p) { __builtin_prefetch(p, 0, 3); }
SL_INLINE void prefetch_l2(const char* p) { __builtin_prefetch(p, 0, 2); }

#endif

// Stores the first n lanes at element `index` of an array of dtype float32 or bfloat16.
SL_INLINE void store_as(void* out, DType dtype, int64_t index, Floats x, int n = kLanes) {
  if (dtype == DType::kFloat32)
    store_n(static_cast<float*>(out) + index, x, n);
  else
    store_n(static_cast<bf16*>(out) + index, x, n);
}

// 2^x for x <= 127: a degree-5 polynomial on [-0.5, 0.5], relative error about 2e-7. Goes to 0 at the low end; NaN
// stays NaN (max and min give their second operand when one is NaN).
SL_INLINE Floats exp2(Floats x) {
  x = max(splat(-160.0f), x);
  const Floats n = round_nearest(x);
  const Floats f = sub(x, n);
  Floats p = splat(1.3264727e-3f);
  p = fma(p, f, splat(9.671513e-3f));
  p = fma(p, f, splat(5.5507336e-2f));
  p = fma(p, f, splat(0.24022242f));
  p = fma(p, f, splat(0.693147f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

inline constexpr float kLog2E = 1.44269504088896f;

// x / (1 + e^-x)
SL_INLINE Floats silu(Floats x) {
  const Floats power = min(max(mul(x, splat(-kLog2E)), splat(-126.0f)), splat(126.0f));
  return div(x, add(splat(1.0f), exp2(power)));
}

// Elements per 4-byte word, the unit in which dot products advance: 1 float32 or 2 bfloat16.
template <class Dot>
inline constexpr int kPerWord = 4 / static_cast<int>(sizeof(typename Dot::Element));

}  // namespace steploop::STEPLOOP_ISA
