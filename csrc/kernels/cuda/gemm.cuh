// The GEMM kernel: out = a weight^T, then the epilogue. One element's sum is one chain of mma.m16n8k16 from k = 0
// upwards whatever the tile, so that neither the tile nor the other rows change its bits. For the same reason nothing
// cuts k between warps or blocks.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace steploop::cuda {

// A block computes kRows x kColumns of out and walks k kDepth at a time, kStages of these in shared memory. A warp
// computes kWarpRows x kWarpColumns; 16 columns hold both gate and up (see kGateUpGroup).
template <int kRows_, int kColumns_, int kDepth_, int kStages_, int kWarpRows_, int kWarpColumns_, int kBlocksPerSm_>
struct GemmShape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kThreads = (kRows / kWarpRows) * (kColumns / kWarpColumns) * 32;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * static_cast<int>(sizeof(uint16_t));
  static constexpr size_t kSharedBytes = static_cast<size_t>(kStages) * kStageBytes;
  static_assert(kRows % kWarpRows == 0 && kColumns % kWarpColumns == 0);
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0 && kDepth % 32 == 0 && kStages >= 2);
};

// How a tile of an operand lies in shared memory: panels of up to 64 elements of k, one after the other, each row by
// row. A row's chunks (8 elements, 16 bytes) change places by an exclusive or with the row's number, so that eight
// neighbouring rows keep the same chunk in different banks: neither ldmatrix nor the copies meet a conflict. Offsets
// are in bytes, which saves an instruction per access.
template <int kRows, int kDepth>
struct TileLayout {
  static constexpr int kPanelChunks = kDepth < 64 ? kDepth / 8 : 8;
  static constexpr int kRowBytes = kPanelChunks * 16;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kRows * kDepth * static_cast<int>(sizeof(uint16_t));
  static_assert(kDepth / 8 % kPanelChunks == 0 && (kPanelChunks == 4 || kPanelChunks == 8));

  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int place = chunk % kPanelChunks ^ row / (8 / kPanelChunks) % kPanelChunks;
    return chunk / kPanelChunks * kPanelBytes + row * kRowBytes + place * 16;
  }

  // offset(row, chunk + 2 * step), given offset(row, chunk) of chunk 0 or 1: one exclusive or and a constant.
  static __device__ __forceinline__ int offset_at_step(int offset_at_0, int step) {
    const int chunk = 2 * step;
    return (offset_at_0 ^ chunk % kPanelChunks * 16) + chunk / kPanelChunks * kPanelBytes;
  }
};

// One thread's share of the copies of one operand's tiles.
template <int kRows, int kDepth, int kThreads>
class TileCopies {
  static constexpr int kChunks = kDepth / 8;
  static constexpr int kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0);

 public:
  static constexpr int kCount = kRows / kRowStep;

  // operand: [num_rows, depth]; the tile starts at first_row, which exists.
  __device__ __forceinline__ TileCopies(const void* operand, int first_row, int num_rows, int depth) {
    row_ = static_cast<int>(threadIdx.x) / kChunks;
    chunk_ = static_cast<int>(threadIdx.x) % kChunks;
    rows_ = num_rows - first_row - row_;
    k_left_ = depth - chunk_ * 8;
    source_ = static_cast<const uint16_t*>(operand) + static_cast<int64_t>(first_row) * depth +
              (k_left_ > 0 ? chunk_ * 8 : 0);
    // Rows that do not exist are not read, but their address is one that does.
    for (int i = 0; i < kCount; ++i) {
      row_offsets_[i] = rows_ > i * kRowStep ? static_cast<uint32_t>(row_ + i * kRowStep) * depth : 0;
    }
    if (k_left_ <= 0) rows_ = 0;
  }

  // Copy i of this step's tile; zeros for what the operand does not have.
  __device__ __forceinline__ void copy(unsigned char* tile, int i) const {
    cp_async_16(tile + TileLayout<kRows, kDepth>::offset(row_ + i * kRowStep, chunk_), source_ + row_offsets_[i],
                rows_ > i * kRowStep);
  }

  __device__ __forceinline__ void next_step() {
    k_left_ -= kDepth;
    if (k_left_ > 0) {
      source_ += kDepth;
    } else {
      rows_ = 0;
    }
  }

 private:
  const uint16_t* source_;
  uint32_t row_offsets_[kCount];
  int row_, chunk_, rows_, k_left_;  // rows_: of the tile, from row_ on
};

// The tile of out that this block computes. Blocks that run together cover a near-square part of out, so that they
// share rows and columns in L2: kGroup tiles of rows go through the columns side by side.
template <class Shape>
__device__ __forceinline__ int2 block_tile(const GemmParams& p) {
  constexpr int kGroup = 8;
  const int row_tiles = (p.num_rows - 1) / Shape::kRows + 1, column_tiles = (p.out_features - 1) / Shape::kColumns + 1;
  const int block = static_cast<int>(blockIdx.x);
  const int group = block / (kGroup * column_tiles), within = block % (kGroup * column_tiles);
  const int group_rows = min(kGroup, row_tiles - group * kGroup);
  return make_int2((group * kGroup + within % group_rows) * Shape::kRows, within / group_rows * Shape::kColumns);
}

// Stores two neighbouring columns of a row, added to bias and for kAdd to what is there.
__device__ __forceinline__ void store_pair(const GemmParams& p, int row, int column, float first, float second) {
  float* out = static_cast<float*>(p.out) + row * p.out_stride + column;
  const bool has_second = column + 1 < p.out_features;
  if (p.bias != nullptr) {
    first += p.bias[column];
    if (has_second) second += p.bias[column + 1];
  }
  const bool add = p.epilogue == Epilogue::kAdd;
  if (has_second && reinterpret_cast<uintptr_t>(out) % sizeof(float2) == 0) {
    const float2 old = add ? *reinterpret_cast<const float2*>(out) : make_float2(0, 0);
    *reinterpret_cast<float2*>(out) = add ? make_float2(old.x + first, old.y + second) : make_float2(first, second);
  } else {
    out[0] = add ? out[0] + first : first;
    if (has_second) out[1] = add ? out[1] + second : second;
  }
}

// Stores silu(gate) * up of two neighbouring columns; gate_column is the first one's gate.
__device__ __forceinline__ void store_silu_mul(const GemmParams& p, int row, int gate_column, float gate0, float gate1,
                                               float up0, float up1) {
  const int up_column = gate_column + kGateUpGroup;
  if (p.bias != nullptr) {
    gate0 += p.bias[gate_column];
    gate1 += p.bias[gate_column + 1];
    up0 += p.bias[up_column];
    up1 += p.bias[up_column + 1];
  }
  const float first = gate0 / (1.0f + expf(-gate0)) * up0, second = gate1 / (1.0f + expf(-gate1)) * up1;
  const int column = gate_column / (2 * kGateUpGroup) * kGateUpGroup + gate_column % kGateUpGroup;
  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + row * p.out_stride + column) =
      p.out_dtype == DType::kBFloat16 ? pack<Bf16>(first, second) : pack<Fp16>(first, second);
}

// The epilogue of a warp's part of out, which starts at this row and column. A thread holds columns 2 (lane % 4) and
// the next of rows lane / 4 and lane / 4 + 8 of each 16 x 8 piece.
template <class Shape>
__device__ __forceinline__ void store_sums(const GemmParams& p, int first_row, int first_column,
                                           const float (&sums)[Shape::kWarpRows / 16][Shape::kWarpColumns / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < Shape::kWarpRows / 8; ++i) {
    const int row = first_row + i * 8 + lane / 4;
    if (row >= p.num_rows) continue;
#pragma unroll
    for (int j = 0; j < Shape::kWarpColumns / 8; j += 2) {
      const int column = first_column + j * 8 + lane % 4 * 2;
      const float *first = &sums[i / 2][j][i % 2 * 2], *second = &sums[i / 2][j + 1][i % 2 * 2];
      if (p.epilogue == Epilogue::kSiluMul) {
        if (column < p.out_features) store_silu_mul(p, row, column, first[0], first[1], second[0], second[1]);
      } else {
        if (column < p.out_features) store_pair(p, row, column, first[0], first[1]);
        if (column + 8 < p.out_features) store_pair(p, row, column + 8, second[0], second[1]);
      }
    }
  }
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) gemm_kernel(GemmParams p) {
  constexpr int kDepth = Shape::kDepth, kStages = Shape::kStages, kSteps = kDepth / 16;
  constexpr int kTileRows = Shape::kWarpRows / 16, kTileColumns = Shape::kWarpColumns / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kWarpsAcross = Shape::kColumns / Shape::kWarpColumns;
  const int warp_row = warp / kWarpsAcross * Shape::kWarpRows;
  const int warp_column = warp % kWarpsAcross * Shape::kWarpColumns;
  const int2 tile = block_tile<Shape>(p);

  using ALayout = TileLayout<Shape::kRows, kDepth>;
  using WeightLayout = TileLayout<Shape::kColumns, kDepth>;
  unsigned char* const stages = shared_memory<unsigned char>();  // [kStages]: a tile of a, then one of weight
  TileCopies<Shape::kRows, kDepth, Shape::kThreads> a_copies(p.a, tile.x, p.num_rows, p.in_features);
  TileCopies<Shape::kColumns, kDepth, Shape::kThreads> weight_copies(p.weight, tile.y, p.out_features, p.in_features);
  constexpr int kCopies = a_copies.kCount + weight_copies.kCount;
  constexpr int kCopiesPerStep = std::max(4, (kCopies + kSteps - 2) / (kSteps - 1));
  const auto copy = [&](int stage, int i) {
    unsigned char* const to = stages + stage * Shape::kStageBytes;
    if (i < weight_copies.kCount) {
      weight_copies.copy(to + ALayout::kBytes, i);
    } else {
      a_copies.copy(to, i - weight_copies.kCount);
    }
  };
  const auto next_step = [&] {
    a_copies.next_step();
    weight_copies.next_step();
  };

  // The fragments of one step of 16, twice: one is loaded while the other is multiplied.
  uint32_t a[2][kTileRows][4], b[2][kTileColumns / 2][4];
  const int a_offset = ALayout::offset(warp_row + lane % 16, lane / 16);
  const int b_offset = WeightLayout::offset(warp_column + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const auto load_fragments = [&](int stage, int step) {
    const unsigned char* const from = stages + stage * Shape::kStageBytes;
    const unsigned char* const a_from = from + ALayout::offset_at_step(a_offset, step);
    const unsigned char* const b_from = from + ALayout::kBytes + WeightLayout::offset_at_step(b_offset, step);
    for (int i = 0; i < kTileRows; ++i) load_matrix_x4(a[step % 2][i], a_from + i * 16 * ALayout::kRowBytes);
    for (int i = 0; i < kTileColumns / 2; ++i) {
      load_matrix_x4(b[step % 2][i], b_from + i * 16 * WeightLayout::kRowBytes);
    }
  };

  float sums[kTileRows][kTileColumns][4] = {};
  // Of k. The last one's missing part is zeros, which keep every bit of a sum: begun at +0, it is never -0.
  const int num_blocks = (p.in_features - 1) / kDepth + 1;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < num_blocks) {
      for (int i = 0; i < kCopies; ++i) copy(stage, i);
      next_step();
    }
    cp_async_commit();
  }
  cp_async_wait<kStages - 2>();
  __syncthreads();
  int stage = 0, free_stage = kStages - 1;
  load_fragments(stage, 0);
  for (int block = 0; block < num_blocks; ++block) {
    const bool copies_left = block + kStages - 1 < num_blocks;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < kSteps - 1) {
        load_fragments(stage, step + 1);
        if (copies_left) {  // the free stage's, a part at a time between the multiplications
          const int first = step * kCopiesPerStep;
#pragma unroll
          for (int i = first; i < std::min(kCopies, first + kCopiesPerStep); ++i) copy(free_stage, i);
        }
      } else {
        next_step();
        cp_async_commit();  // also an empty group, so that the wait below counts blocks
        if (block + 1 < num_blocks) {
          cp_async_wait<kStages - 2>();
          __syncthreads();  // the next block is there, and everyone has read this one: its stage is free
          free_stage = stage;
          stage = stage + 1 == kStages ? 0 : stage + 1;
          load_fragments(stage, 0);
        }
      }
      for (int i = 0; i < kTileRows; ++i) {
        for (int j = 0; j < kTileColumns; ++j) {
          const uint32_t (&pair)[4] = b[step % 2][j / 2];
          mma_16x8x16<Element>(sums[i][j], a[step % 2][i], pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
        }
      }
    }
  }

  store_sums<Shape>(p, tile.x + warp_row, tile.y + warp_column, sums);
}

}  // namespace steploop::cuda
