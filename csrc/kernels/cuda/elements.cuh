// Quads: four neighbouring elements of a row, 16 bytes of float32 or 8 of a 16-bit type. Neighbouring threads take
// neighbouring quads, so that a warp's access covers whole cache lines on both sides of a conversion.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/types.h"
#include "kernels/cuda/ptx.cuh"

namespace steploop::cuda {

struct Quad {
  float v[4];
};

__device__ __forceinline__ Quad load_quad(const float* row, int32_t quad) {
  const uint4 bits = reinterpret_cast<const uint4*>(row)[quad];
  return {{__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)}};
}

template <class Element>
__device__ __forceinline__ Quad load_quad(const uint16_t* row, int32_t quad) {
  const uint2 bits = reinterpret_cast<const uint2*>(row)[quad];
  const float2 low = unpack<Element>(bits.x), high = unpack<Element>(bits.y);
  return {{low.x, low.y, high.x, high.y}};
}

__device__ __forceinline__ void store_quad(float* row, int32_t quad, const Quad& value) {
  reinterpret_cast<uint4*>(row)[quad] = make_uint4(__float_as_uint(value.v[0]), __float_as_uint(value.v[1]),
                                                   __float_as_uint(value.v[2]), __float_as_uint(value.v[3]));
}

template <class Element>
__device__ __forceinline__ void store_quad(uint16_t* row, int32_t quad, const Quad& value) {
  reinterpret_cast<uint2*>(row)[quad] =
      make_uint2(pack<Element>(value.v[0], value.v[1]), pack<Element>(value.v[2], value.v[3]));
}

// Row number `row`, of `size` elements, of an array of a dtype known at run time only. The branch is the same for all
// threads and costs less than an instance per dtype.
__device__ __forceinline__ void store_quad(void* out, DType dtype, int64_t row, int32_t size, int32_t quad,
                                           const Quad& value) {
  if (dtype == DType::kFloat32) {
    store_quad(static_cast<float*>(out) + row * size, quad, value);
  } else if (dtype == DType::kBFloat16) {
    store_quad<Bf16>(static_cast<uint16_t*>(out) + row * size, quad, value);
  } else {
    store_quad<Fp16>(static_cast<uint16_t*>(out) + row * size, quad, value);
  }
}

// How blocks share rows: grid.x counts rows, grid.y the equal parts of a row. A thread takes the items first_item(),
// first_item() + blockDim.x, ..., kPerThread of them, as far as there are any.
struct RowGrid {
  dim3 grid, block;
};

template <int kPerThread>
RowGrid row_grid(int32_t num_rows, int64_t items_per_row) {
  constexpr int64_t kMaxThreads = 256;
  const int64_t parts = ceil_div(items_per_row, kMaxThreads * kPerThread);
  const int64_t threads = parts == 0 ? 0 : round_up(ceil_div(items_per_row, parts * kPerThread), 32);
  return {dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(parts)), dim3(static_cast<unsigned>(threads))};
}

template <int kPerThread>
__device__ __forceinline__ int32_t first_item() {
  return static_cast<int32_t>(blockIdx.y * blockDim.x * kPerThread + threadIdx.x);
}

}  // namespace steploop::cuda
