// simd.h without intrinsics: GCC's and Clang's vector extensions, lowered to what the baseline has.
#pragma once

namespace steploop::STEPLOOP_ISA {

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
SL_INLINE Floats reciprocal(Floats x) { return div(splat(1.0f), x); }
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
SL_INLINE Ints load_ints(const int32_t* p) {
  Ints x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SL_INLINE Ints splat_int(int32_t x) { return Ints{} + x; }
SL_INLINE Ints add(Ints a, Ints b) { return a + b; }
SL_INLINE Ints sub(Ints a, Ints b) { return a - b; }
SL_INLINE Ints max(Ints a, Ints b) { return a > b ? a : b; }
SL_INLINE int32_t reduce_add(Ints x) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
SL_INLINE int32_t reduce_max(Ints x) {
  int32_t largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = std::max(largest, x[i]);
  return largest;
}
SL_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
SL_INLINE Ints to_ints(Floats x) { return __builtin_convertvector(round_nearest(x), Ints); }  // |x| < 2^22
SL_INLINE Ints magnitude_bits(Floats x) {  // grows with |x|; infinity is 0x7f800000, NaN is more
  return reinterpret_cast<Ints>(x) & 0x7fffffff;
}
SL_INLINE void store_codes(int8_t* p, Ints x) {  // of -128..127
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x[i]);
}
SL_INLINE Floats load_half(const char* p) {
  uint16_t halves[kLanes];
  std::memcpy(halves, p, sizeof halves);
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = fp16_to_float(halves[i]);
  return x;
}
SL_INLINE Words low_nibbles(Words x) { return x & 0x0f0f0f0fu; }
SL_INLINE Words high_nibbles(Words x) { return x >> 4 & 0x0f0f0f0fu; }

SL_INLINE void store(int32_t* p, Ints x) { std::memcpy(p, &x, sizeof x); }

struct Float32Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    return reinterpret_cast<Floats>(splat_word(a)) * reinterpret_cast<Floats>(b) + acc;
  }
};
struct BFloat16Dot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    const Words high = Words{} + 0xffff0000u, pair = splat_word(a);
    acc = reinterpret_cast<Floats>(pair << 16) * reinterpret_cast<Floats>(b << 16) + acc;
    return reinterpret_cast<Floats>(pair & high) * reinterpret_cast<Floats>(b & high) + acc;
  }
};
struct WidenedDot {
  using Element = float;
  static SL_INLINE Floats step(Floats acc, const char* a, Words b) {
    acc = reinterpret_cast<Floats>(splat_word(a)) * reinterpret_cast<Floats>(b << 16) + acc;
    return reinterpret_cast<Floats>(splat_word(a + 4)) * reinterpret_cast<Floats>(b & 0xffff0000u) + acc;
  }
};
struct Int8Dot {
  using Element = int32_t;
  static SL_INLINE Ints step(Ints acc, const char* a, Words b) {
    const Words codes = splat_word(a);
    for (int i = 0; i < 32; i += 8)
      acc += (reinterpret_cast<Ints>(codes << (24 - i)) >> 24) * reinterpret_cast<Ints>(b >> i & 0xffu);
    return acc;
  }
};
using NibbleDot = Int8Dot;            // for b's codes of 0..15
inline constexpr int kInt8Offset = 128;  // that Int8Dot leaves on every code of b
SL_INLINE Ints shift_left(Ints x, int n) { return x << n; }
SL_INLINE Ints shift_right(Ints x, int n) { return x >> n; }  // rounding down
// The other lane of each pair that are kStep apart.
template <int kStep>
SL_INLINE Floats swap_lanes(Floats x) {
  Floats swapped;
  for (int i = 0; i < kLanes; ++i) swapped[i] = x[i ^ kStep];
  return swapped;
}
SL_INLINE void prefetch_l1(const char* p) { __builtin_prefetch(p, 0, 3); }
SL_INLINE void prefetch_l2(const char* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace steploop::STEPLOOP_ISA
