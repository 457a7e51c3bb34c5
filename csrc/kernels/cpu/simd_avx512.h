// simd.h for AVX-512 with BF16 and VNNI: sixteen lanes are one register.
#pragma once

#include <immintrin.h>

namespace steploop::STEPLOOP_ISA {

using Floats = __m512;
using Words = __m512i;  // 16 float32, 16 pairs of bfloat16, or 16 times 4 codes
using Ints = __m512i;

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
SL_INLINE Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
SL_INLINE Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
SL_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
SL_INLINE Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
SL_INLINE Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
SL_INLINE int32_t reduce_add(Ints x) { return _mm512_reduce_add_epi32(x); }
SL_INLINE int32_t reduce_max(Ints x) { return _mm512_reduce_max_epi32(x); }
SL_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
SL_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // nearest, ties to even
SL_INLINE Ints magnitude_bits(Floats x) {  // grows with |x|; infinity is 0x7f800000, NaN is more
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}
SL_INLINE void store_codes(int8_t* p, Ints x) {  // of -128..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
SL_INLINE void prefetch_l1(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
SL_INLINE void prefetch_l2(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }
SL_INLINE Ints shift_left(Ints x, int n) { return _mm512_slli_epi32(x, static_cast<unsigned>(n)); }
SL_INLINE Ints shift_right(Ints x, int n) { return _mm512_srai_epi32(x, static_cast<unsigned>(n)); }  // rounding down
inline constexpr int kInt8Offset = 128;  // that the product of 8-bit codes leaves on every code of b

}  // namespace steploop::STEPLOOP_ISA
