// out = silu(gate) * up, gate and up being alternating runs of a row's columns.
#include <cmath>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {
namespace {

constexpr int kQuads = 2;  // of results, per thread: twice as many loads in flight

// group_shift: log2 of the group, 31 where a row has one run of each; -1: the group is no power of two.
__global__ void __launch_bounds__(256) silu_mul_kernel(SiluMulParams p, int32_t group_shift) {
  const int64_t row = blockIdx.x;
  const float* gate_up = p.gate_up + row * 2 * p.size;
  const int32_t num_quads = p.size / 4, first = first_item<kQuads>(), stride = static_cast<int32_t>(blockDim.x);
  Quad gates[kQuads] = {}, ups[kQuads] = {};
  for (int i = 0; i < kQuads; ++i) {
    const int32_t column = (first + i * stride) * 4;
    if (column >= p.size) continue;
    const int32_t run = group_shift >= 0 ? column >> group_shift : column / p.group;
    const float* gate = gate_up + column + static_cast<int64_t>(run) * p.group;
    gates[i] = load_quad(gate, 0);
    ups[i] = load_quad(gate + p.group, 0);
  }
  for (int i = 0; i < kQuads; ++i) {
    if (first + i * stride >= num_quads) break;
    Quad out;
    for (int j = 0; j < 4; ++j) out.v[j] = gates[i].v[j] / (1.0f + expf(-gates[i].v[j])) * ups[i].v[j];
    store_quad(p.out, p.out_dtype, row, p.size, first + i * stride, out);
  }
}

}  // namespace

int silu_mul(const SiluMulParams& params, CudaStream stream) {
  SiluMulParams p = params;
  if (p.group == 0) p.group = p.size;
  if (p.num_rows < 0 || p.size < 0 || p.size % 8 != 0) return cudaErrorInvalidValue;
  if (p.size > 0 && (p.group <= 0 || p.group % 8 != 0 || p.size % p.group != 0)) return cudaErrorInvalidValue;
  int32_t group_shift = -1;
  if (p.group == p.size) {
    group_shift = 31;
  } else if ((p.group & (p.group - 1)) == 0) {
    for (group_shift = 0; (1 << group_shift) < p.group;) ++group_shift;
  }
  const RowGrid shape = row_grid<kQuads>(p.num_rows, p.size / 4);
  return launch(silu_mul_kernel, shape.grid, shape.block, 0, stream, p, group_shift);
}

}  // namespace steploop::cuda
