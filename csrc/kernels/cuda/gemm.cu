// Launches of the GEMM kernel: its tiles, and which one is taken.
#include "kernels/cuda/gemm.cuh"

namespace steploop::cuda {
namespace {

// Few rows: limited by how fast weights arrive. An H200 takes about 4.8 TB/s at a latency of about 800 ns, so nearly
// 4 MB have to be under way, 29 KB per SM: stages are many (28 to 48 KB of weights wait in a block of few rows). Many rows: warps of 64 x 64, since smaller ones would read shared memory faster than it can be read.
// Shared memory stays under the 99 KB of the smaller cards.
//                                rows, columns, k, stages, a warp's rows, columns, blocks per SM that registers allow
using Shape16x16 = GemmShape<16, 16, 128, 8, 16, 16, 3>;
using Shape16x32 = GemmShape<16, 32, 128, 6, 16, 16, 3>;
using Shape16x64 = GemmShape<16, 64, 128, 4, 16, 16, 2>;
using Shape64x32 = GemmShape<64, 32, 64, 8, 32, 16, 2>;
using Shape64x64 = GemmShape<64, 64, 64, 6, 32, 32, 2>;
using Shape128x128 = GemmShape<128, 128, 32, 5, 64, 64, 2>;

template <class Shape>
int64_t num_tiles(int32_t num_rows, int32_t out_features) {
  return ceil_div(num_rows, Shape::kRows) * ceil_div(out_features, Shape::kColumns);
}

template <class Shape>
int launch_gemm(const GemmParams& params, CudaStream stream) {
  const int64_t blocks = num_tiles<Shape>(params.num_rows, params.out_features);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = params.dtype == DType::kBFloat16 ? gemm_kernel<Bf16, Shape> : gemm_kernel<Fp16, Shape>;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kSharedBytes, stream,
                params);
}

bool is_valid(const GemmParams& p) {
  constexpr int32_t kMaxInFeatures = 1 << 24;  // 128 rows of them count in 32 bits
  if (p.num_rows < 0 || p.out_features < 0) return false;
  if (p.in_features <= 0 || p.in_features > kMaxInFeatures || p.in_features % 8 != 0) return false;
  if (p.dtype == DType::kFloat32) return false;
  if (p.epilogue != Epilogue::kSiluMul) return p.out_stride >= p.out_features;
  return p.out_dtype != DType::kFloat32 && p.out_features % (2 * kGateUpGroup) == 0 &&
         p.out_stride >= p.out_features / 2 && p.out_stride % 8 == 0;
}

}  // namespace

GemmTile choose_gemm_tile(int32_t num_rows, int32_t out_features) {
  // A larger tile reads its operands fewer times, but has to come in enough blocks to keep all SMs busy: 108 on an
  // A100, 132 on an H200. (Two 64-row tiles read the weights of up to 128 rows once from memory and once from L2.)
  constexpr int64_t kEnoughBlocks = 128;
  const auto enough = [&]<class Shape>() { return num_tiles<Shape>(num_rows, out_features) >= kEnoughBlocks; };
  if (num_rows <= 16) {
    if (enough.operator()<Shape16x64>()) return GemmTile::k16x64;
    return enough.operator()<Shape16x32>() ? GemmTile::k16x32 : GemmTile::k16x16;
  }
  if (num_rows > 64 && enough.operator()<Shape128x128>()) return GemmTile::k128x128;
  return enough.operator()<Shape64x64>() ? GemmTile::k64x64 : GemmTile::k64x32;
}

int gemm(const GemmParams& params, CudaStream stream) {
  return gemm_with_tile(params, choose_gemm_tile(params.num_rows, params.out_features), stream);
}

int gemm_with_tile(const GemmParams& params, GemmTile tile, CudaStream stream) {
  if (!is_valid(params)) return cudaErrorInvalidValue;
  if (params.num_rows == 0 || params.out_features == 0) return cudaSuccess;
  switch (tile) {
    case GemmTile::k16x16: return launch_gemm<Shape16x16>(params, stream);
    case GemmTile::k16x32: return launch_gemm<Shape16x32>(params, stream);
    case GemmTile::k16x64: return launch_gemm<Shape16x64>(params, stream);
    case GemmTile::k64x32: return launch_gemm<Shape64x32>(params, stream);
    case GemmTile::k64x64: return launch_gemm<Shape64x64>(params, stream);
    case GemmTile::k128x128: return launch_gemm<Shape128x128>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace steploop::cuda
