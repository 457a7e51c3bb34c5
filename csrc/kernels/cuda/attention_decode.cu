// The attention kernel for items of few rows: a block is one warp, so many blocks share a processor and none waits for
// another.
#include "kernels/cuda/attention_warp.cuh"

namespace steploop::cuda {

namespace {

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(32) attention_decode_kernel(const AttentionArgs args) {
  AttentionWarp<Element, kHeadDim, 1>(args).run();
}

}  // namespace

int attention_decode(const AttentionArgs& args, CudaStream stream) {
  return for_attention_instance(args.call, [&]<class Element, int kHeadDim>() {
    return launch(attention_decode_kernel<Element, kHeadDim>, dim3(static_cast<unsigned>(args.num_items)), dim3(32),
                  AttentionShape<kHeadDim, 1>::kSharedBytes, stream, args);
  });
}

}  // namespace steploop::cuda
