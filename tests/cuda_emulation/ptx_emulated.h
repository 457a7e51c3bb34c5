// The wrappers of kernels/cuda/ptx.cuh for emulation on a host: same names, same meaning.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_emulation.h"
#include "half.h"

namespace steploop::cuda {

// ---- Conversion -----------------------------------------------------------------------------------------------------

template <class Element>
float2 unpack(uint32_t pair);

template <>
inline float2 unpack<Bf16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <>
inline float2 unpack<Fp16>(uint32_t pair) {
  return {cuda_emulation::fp16_to_float(static_cast<uint16_t>(pair)),
          cuda_emulation::fp16_to_float(static_cast<uint16_t>(pair >> 16))};
}

template <class Element>
uint32_t pack(float low, float high);

template <>
inline uint32_t pack<Bf16>(float low, float high) {
  return cuda_emulation::float_to_bf16(low) | static_cast<uint32_t>(cuda_emulation::float_to_bf16(high)) << 16;
}

template <>
inline uint32_t pack<Fp16>(float low, float high) {
  return cuda_emulation::float_to_fp16(low) | static_cast<uint32_t>(cuda_emulation::float_to_fp16(high)) << 16;
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // a NaN stays one
}

template <class Element>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
inline void mma_16x8x16<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_emulation::multiply(cuda_emulation::WarpOperation::kMmaBf16, d, a, b0, b1);
}

template <>
inline void mma_16x8x16<Fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_emulation::multiply(cuda_emulation::WarpOperation::kMmaFp16, d, a, b0, b1);
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

// Each lane reads its own share, and only when it goes on: whoever relies on another lane having read is found out.
inline void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  const void* const* rows = cuda_emulation::exchange_rows(cuda_emulation::WarpOperation::kLoadMatrix, row);
  const unsigned lane = cuda_emulation::current_thread->lane;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = static_cast<const uint32_t*>(rows[matrix * 8 + lane / 4])[lane % 4];
  }
}

inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  const void* const* rows = cuda_emulation::exchange_rows(cuda_emulation::WarpOperation::kLoadMatrixTransposed, row);
  const unsigned lane = cuda_emulation::current_thread->lane;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const void* const* pair = rows + matrix * 8 + lane % 4 * 2;
    r[matrix] = static_cast<const uint16_t*>(pair[0])[lane / 4] |
                static_cast<uint32_t>(static_cast<const uint16_t*>(pair[1])[lane / 4]) << 16;
  }
}

// Made here and not by the runtime, so that sanitizers see the kernel read and write.
inline void make_copy(const cuda_emulation::PendingCopy& copy) {
  *static_cast<uint4*>(copy.shared) = copy.valid ? *static_cast<const uint4*>(copy.global) : uint4{0, 0, 0, 0};
}

inline void cp_async_16(void* shared, const void* global, bool valid) {
  const cuda_emulation::PendingCopy copy{shared, global, valid};
  if (cuda_emulation::begin_copy(copy)) make_copy(copy);
}

inline void cp_async_commit() { cuda_emulation::close_copy_group(); }

template <int kPending>
void cp_async_wait() {
  cuda_emulation::PendingCopy copy;
  while (cuda_emulation::take_copy(kPending, copy)) make_copy(copy);
}

}  // namespace steploop::cuda
