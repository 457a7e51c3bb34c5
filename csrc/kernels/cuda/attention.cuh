// What the attention kernels share: arguments, instances, how results of splits come together.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

// The instances: each of these head dimensions, for two element types, in the decode and the prompt kernel. A build
// that is after speed may define it to fewer.
#ifndef STEPLOOP_ATTENTION_HEAD_DIMS
#define STEPLOOP_ATTENTION_HEAD_DIMS 64, 96, 128, 256
#endif

namespace steploop::cuda {

inline constexpr int kKeyGroup = 8;  // keys that always lie in one block

struct AttentionArgs {
  AttentionParams call;
  AttentionPartials partials;
  const AttentionItem* items = nullptr;  // those of this launch
  int32_t num_items = 0;
  int32_t heads = 0;         // that share a kv head
  int32_t block_shift = 0;   // log2 of the block size
  int32_t block_groups = 0;  // bytes of a block, in key groups of one kv head
  int32_t inverse = 0;       // of heads: see token_of
  float scale = 0;           // of scores, in units of log2

  // The query token of an item's row: row / heads, exact for rows below 2 kAttentionItemRows with inverse being 2^16 /
  // heads rounded up.
  __host__ __device__ __forceinline__ int token_of(int row) const { return row * inverse >> 16; }

  // Of an item's row, in q or out.
  __device__ __forceinline__ int64_t head_index(int32_t first_row, int kv_head, int row) const {
    const int token = token_of(row);
    return int64_t{first_row + token} * call.num_heads + kv_head * heads + (row - token * heads);
  }
};

// Each launches args.num_items blocks.
int attention_decode(const AttentionArgs& args, CudaStream stream);
int attention_prompt(const AttentionArgs& args, CudaStream stream);

// launcher.operator()<Element, kHeadDim>() for the call's dtype and head dimension.
template <class Element, int... kHeadDims, class Launcher>
int for_head_dim(int32_t head_dim, const Launcher& launcher) {
  int error = cudaErrorInvalidValue;
  ((head_dim == kHeadDims && ((error = launcher.template operator()<Element, kHeadDims>()), true)) || ...);
  return error;
}

template <class Launcher>
int for_attention_instance(const AttentionParams& call, const Launcher& launcher) {
  if (call.kv.dtype == DType::kBFloat16)
    return for_head_dim<Bf16, STEPLOOP_ATTENTION_HEAD_DIMS>(call.kv.head_dim, launcher);
  return for_head_dim<Fp16, STEPLOOP_ATTENTION_HEAD_DIMS>(call.kv.head_dim, launcher);
}

// ---- Splits ----------------------------------------------------------------------------------------------------------

inline constexpr float kLowestMax = -1e30f;  // start of a running maximum; finite, so that differences stay finite

// Running total over a row's splits. Folding in a split that lies after the row's position (maximum kLowestMax, sum 0,
// values 0) changes nothing: keep is 1, take is 0.
struct SplitTotal {
  float max = kLowestMax;
  float sum = 0;

  struct Weights {
    float keep, take;
  };

  __device__ __forceinline__ Weights fold(float split_max, float split_sum) {
    const float new_max = fmaxf(max, split_max);
    const Weights w{exp2_approx(max - new_max), exp2_approx(split_max - new_max)};
    max = new_max;
    sum = fmaf(sum, w.keep, split_sum * w.take);
    return w;
  }
};

__device__ __forceinline__ float fold_value(float total, float split, SplitTotal::Weights w) {
  return fmaf(total, w.keep, split * w.take);
}

}  // namespace steploop::cuda
