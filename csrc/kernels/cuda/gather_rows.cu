// Copies chosen float32 rows: out[i] = in[rows[i]].
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {
namespace {

constexpr int kQuads = 4;  // per thread: loads in flight

__global__ void __launch_bounds__(256)
    gather_rows_kernel(const float* in, const int32_t* rows, float* out, int32_t size) {
  const int64_t row = blockIdx.x;
  const float* from = in + static_cast<int64_t>(rows[row]) * size;
  float* to = out + row * size;
  const int32_t num_quads = size / 4, first = first_item<kQuads>(), stride = static_cast<int32_t>(blockDim.x);
  Quad quads[kQuads] = {};
  for (int i = 0; i < kQuads; ++i)
    if (first + i * stride < num_quads) quads[i] = load_quad(from, first + i * stride);
  for (int i = 0; i < kQuads; ++i)
    if (first + i * stride < num_quads) store_quad(to, first + i * stride, quads[i]);
}

}  // namespace

int gather_rows(const float* in, const int32_t* rows, float* out, int32_t num_rows, int32_t size, CudaStream stream) {
  if (num_rows < 0 || size < 0 || size % 4 != 0) return cudaErrorInvalidValue;
  const RowGrid shape = row_grid<kQuads>(num_rows, size / 4);
  return launch(gather_rows_kernel, shape.grid, shape.block, 0, stream, in, rows, out, size);
}

}  // namespace steploop::cuda
