// The GEMM's epilogues for a 16-bit product that another library wrote.
#include <cmath>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {
namespace {

__device__ __forceinline__ Quad load_product(const uint16_t* row, DType dtype, int32_t quad) {
  return dtype == DType::kBFloat16 ? load_quad<Bf16>(row, quad) : load_quad<Fp16>(row, quad);
}

__device__ __forceinline__ float load_product_column(const uint16_t* row, DType dtype, int32_t column) {
  return dtype == DType::kBFloat16 ? unpack<Bf16>(row[column]).x : unpack<Fp16>(row[column]).x;
}

// out = [out +] (product + bias). A thread takes four columns; `aligned`: they can be accessed as a quad.
__global__ void __launch_bounds__(256) store_kernel(LinearEpilogueParams p, bool aligned) {
  const int64_t row = blockIdx.x;
  const uint16_t* product = static_cast<const uint16_t*>(p.product) + row * p.out_features;
  float* out = static_cast<float*>(p.out) + row * p.out_stride;
  const bool add = p.epilogue == Epilogue::kAdd;
  const int32_t quad = first_item<1>();
  if (quad >= (p.out_features - 1) / 4 + 1) return;
  if (aligned) {
    Quad value = load_product(product, p.dtype, quad);
    if (p.bias != nullptr) {
      const Quad bias = load_quad(p.bias, quad);
      for (int j = 0; j < 4; ++j) value.v[j] += bias.v[j];
    }
    if (add) {
      const Quad old = load_quad(out, quad);
      for (int j = 0; j < 4; ++j) value.v[j] = old.v[j] + value.v[j];
    }
    store_quad(out, quad, value);
    return;
  }
  for (int32_t column = quad * 4; column < min(quad * 4 + 4, p.out_features); ++column) {
    float value = load_product_column(product, p.dtype, column);
    if (p.bias != nullptr) value += p.bias[column];
    out[column] = add ? out[column] + value : value;
  }
}

// out = silu(gate) * up. A thread takes four columns of out.
__global__ void __launch_bounds__(256) store_silu_mul_kernel(LinearEpilogueParams p) {
  const int64_t row = blockIdx.x;
  const uint16_t* product = static_cast<const uint16_t*>(p.product) + row * p.out_features;
  uint16_t* out = static_cast<uint16_t*>(p.out) + row * p.out_stride;
  const int32_t quad = first_item<1>();
  if (quad >= p.out_features / 8) return;
  constexpr int32_t kGroupQuads = kGateUpGroup / 4;
  const int32_t gate_quad = quad / kGroupQuads * 2 * kGroupQuads + quad % kGroupQuads;
  const int32_t up_quad = gate_quad + kGroupQuads;
  Quad gate = load_product(product, p.dtype, gate_quad), up = load_product(product, p.dtype, up_quad);
  if (p.bias != nullptr) {
    for (int j = 0; j < 4; ++j) gate.v[j] += p.bias[gate_quad * 4 + j];
    for (int j = 0; j < 4; ++j) up.v[j] += p.bias[up_quad * 4 + j];
  }
  Quad value;
  for (int j = 0; j < 4; ++j) value.v[j] = gate.v[j] / (1.0f + expf(-gate.v[j])) * up.v[j];
  if (p.out_dtype == DType::kBFloat16) {
    store_quad<Bf16>(out, quad, value);
  } else {
    store_quad<Fp16>(out, quad, value);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

int linear_epilogue(const LinearEpilogueParams& params, CudaStream stream) {
  const LinearEpilogueParams& p = params;
  if (p.num_rows < 0 || p.out_features < 0 || p.dtype == DType::kFloat32) return cudaErrorInvalidValue;
  if (p.epilogue == Epilogue::kSiluMul) {
    if (p.out_dtype == DType::kFloat32 || p.out_features % (2 * kGateUpGroup) != 0 ||
        p.out_stride < p.out_features / 2 || p.out_stride % 8 != 0) {
      return cudaErrorInvalidValue;
    }
    const RowGrid shape = row_grid<1>(p.num_rows, p.out_features / 8);
    return launch(store_silu_mul_kernel, shape.grid, shape.block, 0, stream, p);
  }
  if (p.out_stride < p.out_features) return cudaErrorInvalidValue;
  const bool aligned = p.out_features % 4 == 0 && p.out_stride % 4 == 0 && is_aligned(p.product) && is_aligned(p.out) &&
                       is_aligned(p.bias);
  const RowGrid shape = row_grid<1>(p.num_rows, ceil_div(p.out_features, 4));
  return launch(store_kernel, shape.grid, shape.block, 0, stream, p, aligned);
}

}  // namespace steploop::cuda
