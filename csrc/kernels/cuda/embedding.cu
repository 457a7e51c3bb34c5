// Token embedding: rows of a 16-bit or float32 table, as float32.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace steploop::cuda {
namespace {

constexpr int kQuads = 4;  // per thread: loads in flight

template <class Element>
__global__ void __launch_bounds__(256) embedding_kernel(EmbeddingParams p, const uint16_t* table) {
  const int64_t row = blockIdx.x;
  const uint16_t* from = table + static_cast<int64_t>(p.token_ids[row]) * p.hidden_size;
  float* to = p.out + row * p.hidden_size;
  const int32_t num_quads = p.hidden_size / 4, first = first_item<kQuads>(), stride = static_cast<int32_t>(blockDim.x);
  Quad quads[kQuads] = {};
  for (int i = 0; i < kQuads; ++i)
    if (first + i * stride < num_quads) quads[i] = load_quad<Element>(from, first + i * stride);
  for (int i = 0; i < kQuads; ++i)
    if (first + i * stride < num_quads) store_quad(to, first + i * stride, quads[i]);
}

}  // namespace

int embedding(const EmbeddingParams& params, const void* table, DType table_dtype, CudaStream stream) {
  if (params.num_tokens < 0 || params.hidden_size < 0 || params.hidden_size % 8 != 0) return cudaErrorInvalidValue;
  if (table_dtype == DType::kFloat32) {
    return gather_rows(static_cast<const float*>(table), params.token_ids, params.out, params.num_tokens,
                       params.hidden_size, stream);
  }
  const RowGrid shape = row_grid<kQuads>(params.num_tokens, params.hidden_size / 4);
  return launch(table_dtype == DType::kBFloat16 ? embedding_kernel<Bf16> : embedding_kernel<Fp16>, shape.grid,
                shape.block, 0, stream, params, static_cast<const uint16_t*>(table));
}

}  // namespace steploop::cuda
