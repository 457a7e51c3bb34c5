// The PTX instructions that kernels use, each wrapped once. Emulation on a host (tests/cuda_emulation) has its own
// version of every wrapper, with the same meaning.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace steploop::cuda {

// 16-bit element types, by tag: elements travel as uint16_t, or in pairs as uint32_t with the lower index in the lower
// half.
struct Bf16 {};
struct Fp16 {};

}  // namespace steploop::cuda

#ifdef STEPLOOP_CUDA_EMULATION
#include "ptx_emulated.h"
#else

namespace steploop::cuda {

// ---- Conversion: pairs of elements to and from float32, rounding to nearest even -------------------------------------

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<Bf16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack<Fp16>(uint32_t pair) {
  float2 out;
  asm("{.reg .f16 lo, hi;\n"
      " mov.b32 {lo, hi}, %2;\n"
      " cvt.f32.f16 %0, lo;\n"
      " cvt.f32.f16 %1, hi;}"
      : "=f"(out.x), "=f"(out.y)
      : "r"(pair));
  return out;
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<Bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t pack<Fp16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ---- Arithmetic ------------------------------------------------------------------------------------------------------

// 2^x, denormal results as 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// d += a b of one warp (volatile, so that it stays where the whole warp is): a 16x16 row-major, b 16x8 column-major, in the fragment layout of mma.m16n8k16.
template <class Element>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<Fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Shared memory ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements: lane i gives the address (16-byte aligned) of row i % 8 of matrix i / 8;
// r[j] is this lane's pair of matrix j. The whole warp calls it.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copies 16 bytes from global to shared memory, some time before a wait that covers its group; zeros if not valid
// (`global` is then not read, but must be an address).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Closes this thread's group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace steploop::cuda

#endif
