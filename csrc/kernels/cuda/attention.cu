// Attention: which kernel takes which items, and the merge of items that were cut along their keys.
#include "kernels/cuda/attention.cuh"

namespace steploop::cuda {

namespace {

constexpr int kMergeThreads = 128;
constexpr int kMergeSlices = 4;  // blocks that share the rows of one merge

// A thread takes two columns of a row through all splits.
template <class Element>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const AttentionArgs args) {
  const AttentionMerge merge = args.call.work.merges[blockIdx.x];
  const int rows = merge.num_rows * args.heads;
  const int pairs = args.call.kv.head_dim / 2;
  const float2* max_sum = reinterpret_cast<const float2*>(args.partials.max_sum) + merge.partial_row;
  const float2* parts = reinterpret_cast<const float2*>(args.partials.out) + int64_t{merge.partial_row} * pairs;
  const int stride = static_cast<int>(gridDim.y * blockDim.x);
  for (int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x); i < rows * pairs; i += stride) {
    const int row = i / pairs;
    SplitTotal total;
    float2 value = make_float2(0, 0);
    for (int split = 0; split < merge.num_splits; ++split) {
      const float2 state = max_sum[split * rows + row];
      const float2 part = parts[int64_t{split} * rows * pairs + i];
      const SplitTotal::Weights w = total.fold(state.x, state.y);
      value.x = fold_value(value.x, part.x, w);
      value.y = fold_value(value.y, part.y, w);
    }
    const float scale = 1.0f / total.sum;
    const int64_t head = args.head_index(merge.out_row, merge.kv_head, row);
    static_cast<uint32_t*>(args.call.out)[head * pairs + i % pairs] = pack<Element>(value.x * scale, value.y * scale);
  }
}

template <class Element>
int merge(const AttentionArgs& args, CudaStream stream) {
  return launch(merge_kernel<Element>, dim3(static_cast<unsigned>(args.call.work.num_merges), kMergeSlices),
                dim3(kMergeThreads), 0, stream, args);
}

bool is_supported(const AttentionParams& params) {
  const KvCacheView& kv = params.kv;
  const bool sizes = kv.num_kv_heads > 0 && params.num_heads > 0 && params.num_heads % kv.num_kv_heads == 0 &&
                     (kv.block_size == 8 || kv.block_size == 16 || kv.block_size == 32 || kv.block_size == 64);
  if (!sizes || kv.dtype == DType::kFloat32 || params.out_dtype != kv.dtype || !(params.scale > 0)) return false;
  const int32_t heads = params.num_heads / kv.num_kv_heads;
  return heads <= (params.work.num_small > 0 ? kAttentionSmallRows : kAttentionItemRows) &&
         kv.block_bytes == int64_t{2} * 2 * kv.num_kv_heads * kv.block_size * kv.head_dim;
}

}  // namespace

int attention(const AttentionParams& params, const AttentionPartials& partials, CudaStream stream) {
  if (!is_supported(params)) return cudaErrorInvalidValue;
  AttentionArgs args{params, partials};
  args.heads = params.num_heads / params.kv.num_kv_heads;
  args.block_groups = 2 * params.kv.num_kv_heads * (params.kv.block_size / kKeyGroup);
  args.inverse = static_cast<int32_t>(ceil_div(1 << 16, args.heads));
  while (1 << args.block_shift < params.kv.block_size) ++args.block_shift;
  constexpr float kLog2E = 1.4426950408889634f;
  args.scale = params.scale * kLog2E;

  const AttentionWork& work = params.work;
  args.items = work.items;
  args.num_items = work.num_small;
  if (const int error = attention_decode(args, stream)) return error;
  args.items = work.items + work.num_small;
  args.num_items = work.num_items - work.num_small;
  if (const int error = attention_prompt(args, stream)) return error;
  return params.kv.dtype == DType::kBFloat16 ? merge<Bf16>(args, stream) : merge<Fp16>(args, stream);
}

}  // namespace steploop::cuda
