// What lies between the QKV product and attention, in one launch: optional RMSNorm of each query and key head, rotation
// of queries and keys, queries out, keys and values into the cache.
//
// The cache of a layer is [num_blocks, num_kv_heads, 2 (key, value), block_size, head_dim]. A group of 8, 16 or 32 lanes
// (the least that holds head_dim / 8) takes a head of a token: lane i has quad i of the head's lower half and quad i of
// its upper half, which are the pairs that rotate together.
#include <type_traits>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"

namespace steploop::cuda {
namespace {

// The sum over the head's elements, for every lane of its group.
__device__ __forceinline__ float group_sum(float value, int32_t lanes) {
  for (int32_t distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

// To what float16 holds; NaN stays NaN.
__device__ __forceinline__ void saturate(Quad& quad) {
  constexpr float kLargest = 65504;
  for (float& v : quad.v) v = v > kLargest ? kLargest : v < -kLargest ? -kLargest : v;
}

// block_shift: log2 of block_size; -1: it is no power of two.
__device__ __forceinline__ uint16_t* cache_row(const KvCacheView& kv, int64_t slot, int32_t block_shift,
                                               int32_t kv_head, int32_t is_value) {
  const int64_t block = block_shift >= 0 ? slot >> block_shift : slot / kv.block_size;
  const int32_t offset = static_cast<int32_t>(slot - block * kv.block_size);
  uint16_t* heads = reinterpret_cast<uint16_t*>(static_cast<char*>(kv.data) + block * kv.block_bytes);
  return heads + static_cast<int64_t>((kv_head * 2 + is_value) * kv.block_size + offset) * kv.head_dim;
}

template <class Element>
__global__ void __launch_bounds__(256)
    rope_kv_write_kernel(RopeKvWriteParams p, int32_t lane_shift, int32_t block_shift) {
  const int64_t token = blockIdx.x;
  const int32_t head_dim = p.kv.head_dim, num_kv_heads = p.kv.num_kv_heads, half_quads = head_dim / 8;
  const int32_t num_heads = p.num_heads + 2 * num_kv_heads, lanes = 1 << lane_shift;
  const int32_t head = first_item<1>() >> lane_shift;
  const int32_t quad = static_cast<int32_t>(threadIdx.x) & (lanes - 1);
  const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + num_kv_heads;
  const bool active = head < num_heads && quad < half_quads;

  const float* in = p.qkv + (token * num_heads + head) * head_dim;
  Quad low = {}, high = {}, cos = {}, sin = {};
  int64_t slot = 0;
  if (active) {
    if (!is_query) slot = p.slot_mapping[token];
    low = load_quad(in, quad);
    high = load_quad(in, quad + half_quads);
  }
  if (active && !is_value) {
    const int64_t angles = static_cast<int64_t>(p.positions[token]) * (head_dim / 2);
    cos = load_quad(p.cos + angles, quad);
    sin = load_quad(p.sin + angles, quad);
  }

  if (p.q_norm || p.k_norm) {  // the same for all threads: whole warps add up
    float squares = 0;
    for (const float value : low.v) squares = fmaf(value, value, squares);
    for (const float value : high.v) squares = fmaf(value, value, squares);
    const float scale = rsqrtf(group_sum(squares, lanes) / static_cast<float>(head_dim) + p.norm_eps);
    const float* weight = is_query ? p.q_norm : is_value ? nullptr : p.k_norm;
    if (active && weight) {
      const Quad low_weight = load_quad(weight, quad), high_weight = load_quad(weight, quad + half_quads);
      for (int i = 0; i < 4; ++i) low.v[i] = low.v[i] * scale * low_weight.v[i];
      for (int i = 0; i < 4; ++i) high.v[i] = high.v[i] * scale * high_weight.v[i];
    }
  }
  if (!active) return;

  if (!is_value) {
    for (int i = 0; i < 4; ++i) {
      const float x = low.v[i], y = high.v[i];
      low.v[i] = fmaf(x, cos.v[i], -(y * sin.v[i]));
      high.v[i] = fmaf(y, cos.v[i], x * sin.v[i]);
    }
  }
  uint16_t* out;
  if (is_query) {
    out = static_cast<uint16_t*>(p.q) + (token * p.num_heads + head) * head_dim;
  } else {
    if constexpr (std::is_same_v<Element, Fp16>) {
      // An infinity that one row's weight 0 multiplies would give NaN, and which rows meet it depends on the chunks.
      saturate(low);
      saturate(high);
    }
    const int32_t kv_head = head - p.num_heads - (is_value ? num_kv_heads : 0);
    out = cache_row(p.kv, slot, block_shift, kv_head, is_value);
  }
  store_quad<Element>(out, quad, low);
  store_quad<Element>(out, quad + half_quads, high);
}

}  // namespace

int rope_kv_write(const RopeKvWriteParams& params, CudaStream stream) {
  const KvCacheView& kv = params.kv;
  if (params.num_tokens < 0 || params.num_heads < 0 || kv.num_kv_heads < 0) return cudaErrorInvalidValue;
  if (kv.head_dim <= 0 || kv.head_dim > 256 || kv.head_dim % 16 != 0) return cudaErrorInvalidValue;
  if (kv.dtype == DType::kFloat32 || kv.block_size <= 0) return cudaErrorInvalidValue;
  const int32_t lane_shift = kv.head_dim <= 64 ? 3 : kv.head_dim <= 128 ? 4 : 5;
  int32_t block_shift = -1;
  if ((kv.block_size & (kv.block_size - 1)) == 0)
    for (block_shift = 0; (1 << block_shift) < kv.block_size;) ++block_shift;
  // A row's items are its heads' lanes.
  const RowGrid shape = row_grid<1>(params.num_tokens, int64_t{params.num_heads + 2 * kv.num_kv_heads} << lane_shift);
  return launch(kv.dtype == DType::kBFloat16 ? rope_kv_write_kernel<Bf16> : rope_kv_write_kernel<Fp16>, shape.grid,
                shape.block, 0, stream, params, lane_shift, block_shift);
}

}  // namespace steploop::cuda
