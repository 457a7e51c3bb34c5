// Copies whole KV blocks between pools, for each layer: copy-on-write, and swap to and from pinned host memory. No
// block is the source of one pair and the destination of another.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {
namespace {

constexpr int kVectors = 4;  // of 16 bytes, per thread: loads in flight

// grid: pairs, parts of a block, layers.
__global__ void __launch_bounds__(256) transfer_blocks_kernel(TransferBlocksParams p) {
  const int64_t source = p.pairs[2 * static_cast<int64_t>(blockIdx.x)];
  const int64_t destination = p.pairs[2 * static_cast<int64_t>(blockIdx.x) + 1];
  const int64_t vectors_per_block = p.block_bytes / 16;
  const uint4* from = static_cast<const uint4*>(p.src_layers[blockIdx.z]) + source * vectors_per_block;
  uint4* to = static_cast<uint4*>(p.dst_layers[blockIdx.z]) + destination * vectors_per_block;
  const int32_t first = first_item<kVectors>(), stride = static_cast<int32_t>(blockDim.x);
  uint4 vectors[kVectors] = {};
  for (int i = 0; i < kVectors; ++i)
    if (first + i * stride < vectors_per_block) vectors[i] = from[first + i * stride];
  for (int i = 0; i < kVectors; ++i)
    if (first + i * stride < vectors_per_block) to[first + i * stride] = vectors[i];
}

}  // namespace

int transfer_blocks(const TransferBlocksParams& params, CudaStream stream) {
  constexpr int64_t kMaxGrid = 65535;  // of grid.y and grid.z
  if (params.num_pairs < 0 || params.num_layers < 0 || params.num_layers > kMaxGrid) return cudaErrorInvalidValue;
  if (params.block_bytes < 0 || params.block_bytes % 16 != 0) return cudaErrorInvalidValue;
  RowGrid shape = row_grid<kVectors>(params.num_pairs, params.block_bytes / 16);
  if (shape.grid.y > kMaxGrid) return cudaErrorInvalidValue;
  shape.grid.z = static_cast<unsigned>(params.num_layers);
  return launch(transfer_blocks_kernel, shape.grid, shape.block, 0, stream, params);
}

}  // namespace steploop::cuda
