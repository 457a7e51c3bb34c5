// RMSNorm of float32 rows, with an optional residual added to the row first. One block works on one row and keeps it
// in registers between the two passes. The block's size depends on the row's size alone, hence so does the order of
// summation.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"

namespace steploop::cuda {
namespace {

constexpr int kQuads = 4;  // per thread

template <int kThreads>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(RmsNormParams p) {
  const int64_t row = blockIdx.x;
  float* x = p.x + row * p.size;
  const int32_t num_quads = p.size / 4, first = static_cast<int32_t>(threadIdx.x);

  Quad values[kQuads] = {}, weights[kQuads] = {};
  for (int i = 0; i < kQuads; ++i)
    if (first + i * kThreads < num_quads) values[i] = load_quad(x, first + i * kThreads);
  if (p.residual) {
    const float* residual = p.residual + row * p.size;
    Quad added[kQuads] = {};
    for (int i = 0; i < kQuads; ++i)
      if (first + i * kThreads < num_quads) added[i] = load_quad(residual, first + i * kThreads);
    for (int i = 0; i < kQuads; ++i) {
      for (int j = 0; j < 4; ++j) values[i].v[j] += added[i].v[j];
      if (first + i * kThreads < num_quads) store_quad(x, first + i * kThreads, values[i]);
    }
  }
  for (int i = 0; i < kQuads; ++i)  // on their way while the block adds up
    if (first + i * kThreads < num_quads) weights[i] = load_quad(p.weight, first + i * kThreads);

  float squares = 0;
  for (const Quad& quad : values)
    for (const float value : quad.v) squares = fmaf(value, value, squares);
  squares = block_sum<kThreads>(squares, shared_memory<float>());

  const float scale = rsqrtf(squares / static_cast<float>(p.size) + p.eps);
  for (int i = 0; i < kQuads; ++i) {
    if (first + i * kThreads >= num_quads) break;
    for (int j = 0; j < 4; ++j) values[i].v[j] = values[i].v[j] * scale * weights[i].v[j];
    store_quad(p.out, p.out_dtype, row, p.size, first + i * kThreads, values[i]);
  }
}

template <int kThreads>
int launch_rms_norm(const RmsNormParams& params, CudaStream stream) {
  return launch(rms_norm_kernel<kThreads>, dim3(static_cast<unsigned>(params.num_rows)), dim3(kThreads),
                kThreads / 32 * sizeof(float), stream, params);
}

}  // namespace

int rms_norm(const RmsNormParams& params, CudaStream stream) {
  const int32_t multiple = params.out_dtype == DType::kFloat32 ? 4 : 8;
  if (params.num_rows < 0 || params.size <= 0 || params.size > kMaxNormSize || params.size % multiple != 0)
    return cudaErrorInvalidValue;
  const int32_t threads_needed = static_cast<int32_t>(ceil_div(params.size, 4 * kQuads));
  if (threads_needed <= 64) return launch_rms_norm<64>(params, stream);
  if (threads_needed <= 128) return launch_rms_norm<128>(params, stream);
  if (threads_needed <= 256) return launch_rms_norm<256>(params, stream);
  if (threads_needed <= 512) return launch_rms_norm<512>(params, stream);
  return launch_rms_norm<1024>(params, stream);
}

}  // namespace steploop::cuda
