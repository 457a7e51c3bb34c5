// CUDA's built-in variables and functions for device code.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_emulation.h"

#define threadIdx (cuda_emulation::current_thread->thread_index)
#define blockIdx (cuda_emulation::current_thread->block_index)
#define blockDim (cuda_emulation::current_thread->grid.block_dim)
#define gridDim (cuda_emulation::current_thread->grid.grid_dim)

inline constexpr int warpSize = 32;

// ---- Waiting for others ---------------------------------------------------------------------------------------------

inline void __syncthreads() { cuda_emulation::sync_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_emulation::sync_warp(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- Shuffles and votes ---------------------------------------------------------------------------------------------

namespace cuda_emulation {

template <class T>
T shuffle_value(WarpOperation operation, unsigned mask, T value, unsigned source_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(operation, mask, bits, source_lane, sizeof(T));
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = cuda_emulation::current_thread->lane, in_segment = static_cast<unsigned>(width) - 1;
  return cuda_emulation::shuffle_value(cuda_emulation::WarpOperation::kShuffle, mask, value,
                                       (lane & ~in_segment) | (static_cast<unsigned>(source) & in_segment));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const unsigned lane = cuda_emulation::current_thread->lane, in_segment = static_cast<unsigned>(width) - 1;
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  return cuda_emulation::shuffle_value(cuda_emulation::WarpOperation::kShuffleXor, mask, value,
                                       source <= (lane | in_segment) ? source : lane);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = cuda_emulation::current_thread->lane, in_segment = static_cast<unsigned>(width) - 1;
  return cuda_emulation::shuffle_value(cuda_emulation::WarpOperation::kShuffleUp, mask, value,
                                       delta <= (lane & in_segment) ? lane - delta : lane);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = cuda_emulation::current_thread->lane, in_segment = static_cast<unsigned>(width) - 1;
  return cuda_emulation::shuffle_value(cuda_emulation::WarpOperation::kShuffleDown, mask, value,
                                       delta <= in_segment - (lane & in_segment) ? lane + delta : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_emulation::vote(cuda_emulation::WarpOperation::kBallot, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return cuda_emulation::vote(cuda_emulation::WarpOperation::kAny, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_emulation::vote(cuda_emulation::WarpOperation::kAll, mask, predicate == 0) == 0;
}

// ---- Atomics: relaxed, as on a GPU ----------------------------------------------------------------------------------

namespace cuda_emulation {

// Returns what was there before.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  T old, next;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    next = update(old);
  } while (!__atomic_compare_exchange(address, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace cuda_emulation

inline float atomicAdd(float* address, float value) {
  return cuda_emulation::atomic_update(address, [=](float old) { return old + value; });
}

#define CUDA_EMULATION_INTEGER_ATOMICS(T)                                                                    \
  inline T atomicAdd(T* address, T value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }   \
  inline T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); } \
  inline T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }     \
  inline T atomicMax(T* address, T value) {                                                                  \
    return cuda_emulation::atomic_update(address, [=](T old) { return std::max(old, value); });              \
  }                                                                                                          \
  inline T atomicMin(T* address, T value) {                                                                  \
    return cuda_emulation::atomic_update(address, [=](T old) { return std::min(old, value); });              \
  }                                                                                                          \
  inline T atomicCAS(T* address, T expected, T value) {                                                      \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);       \
    return expected;                                                                                         \
  }
CUDA_EMULATION_INTEGER_ATOMICS(int)
CUDA_EMULATION_INTEGER_ATOMICS(unsigned)
CUDA_EMULATION_INTEGER_ATOMICS(unsigned long long)
#undef CUDA_EMULATION_INTEGER_ATOMICS

// ---- Memory and bits ------------------------------------------------------------------------------------------------

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(lrintf(x)); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

// Newer C libraries have a rsqrtf of their own; this one is found first from kernels.
namespace steploop::cuda {
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
}  // namespace steploop::cuda
