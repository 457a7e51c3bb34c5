// The attention kernel for items of many rows: four warps of 16 rows share each tile of keys and values.
#include "kernels/cuda/attention_warp.cuh"

namespace steploop::cuda {

namespace {

constexpr int kWarps = kAttentionItemRows / kWarpRows;

// How many blocks one processor is to hold: what registers allow without spills.
constexpr int resident_blocks(int head_dim) { return head_dim < 128 ? 3 : head_dim == 128 ? 2 : 1; }

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kWarps * 32, resident_blocks(kHeadDim))
    attention_prompt_kernel(const AttentionArgs args) {
  AttentionWarp<Element, kHeadDim, kWarps>(args).run();
}

}  // namespace

// The decode kernel needs less.
int attention_shared_bytes(int32_t head_dim) {
  size_t bytes = 0;
  for_head_dim<Bf16, STEPLOOP_ATTENTION_HEAD_DIMS>(head_dim, [&]<class Element, int kHeadDim>() {
    bytes = AttentionShape<kHeadDim, kWarps>::kSharedBytes;
    return 0;
  });
  return static_cast<int>(bytes);
}

int attention_prompt(const AttentionArgs& args, CudaStream stream) {
  return for_attention_instance(args.call, [&]<class Element, int kHeadDim>() {
    return launch(attention_prompt_kernel<Element, kHeadDim>, dim3(static_cast<unsigned>(args.num_items)),
                  dim3(kWarps * 32), AttentionShape<kHeadDim, kWarps>::kSharedBytes, stream, args);
  });
}

}  // namespace steploop::cuda
