// The CUDA kernels, as functions that launch them. No CUDA header is needed to call one.
//
// Each checks its arguments' sizes, enqueues its work on the stream and returns a cudaError_t: 0, or
// cudaErrorInvalidValue for a shape or dtype it cannot take. All pointers are device pointers unless said otherwise.
// dtypes are bfloat16 and float16 where a 16-bit type is meant. Rows of 16-bit elements start at multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "kernels/params.h"

struct CUstream_st;  // CUDA's

namespace steploop {

using CudaStream = CUstream_st*;

namespace cuda {

// Rows of a gate_up weight alternate: 8 of gate, then 8 of up. So both halves of a result are in one thread's hands.
inline constexpr int32_t kGateUpGroup = 8;

// out = a weight^T, summed over in_features in one order whatever num_rows is; then the epilogue.
struct GemmParams {
  const void* a = nullptr;  // [num_rows, in_features] of dtype
  const void* weight = nullptr;  // [out_features, in_features] of dtype
  const float* bias = nullptr;  // [out_features] or null
  void* out = nullptr;  // [num_rows, out_stride]; float32, or out_dtype for kSiluMul
  int64_t out_stride = 0;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  int32_t num_rows = 0;
  int32_t out_features = 0;  // kSiluMul writes half as many; a multiple of 16 then
  int32_t in_features = 0;  // a multiple of 8
  Epilogue epilogue = Epilogue::kStore;
};

// What one block of the GEMM computes: rows x columns of out. All give the same bits.
enum class GemmTile : uint8_t { k16x16, k16x32, k16x64, k64x32, k64x64, k128x128 };

// Limits of one attention item: a warp's tile of the decode kernel, a block's of the prompt kernel.
inline constexpr int32_t kAttentionSmallRows = 16;
inline constexpr int32_t kAttentionItemRows = 64;

// The epilogue alone, of a product that another library wrote.
struct LinearEpilogueParams {
  const void* product = nullptr;  // [num_rows, out_features] of dtype
  const float* bias = nullptr;
  void* out = nullptr;  // as in GemmParams
  int64_t out_stride = 0;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  int32_t num_rows = 0;
  int32_t out_features = 0;
  Epilogue epilogue = Epilogue::kStore;
};

// Where attention items that own a part of their keys leave their results.
struct AttentionPartials {
  float* out = nullptr;  // [num_partial_rows, head_dim], not normalised
  float* max_sum = nullptr;  // [num_partial_rows, 2]: running maximum (in units of log2) and sum of weights
};

// dst block pairs[i][1] = src block pairs[i][0], for each layer. One side may be pinned host memory.
struct TransferBlocksParams {
  const void* const* src_layers = nullptr;  // [num_layers] device array: each layer's pool
  void* const* dst_layers = nullptr;  // [num_layers] device array
  const int32_t* pairs = nullptr;  // [num_pairs, 2]
  int64_t block_bytes = 0;  // a multiple of 16
  int32_t num_layers = 0;
  int32_t num_pairs = 0;
};

struct SampleRowParams {
  uint64_t seed = 0;
  int64_t position = 0;
  double top_p = 1;  // in (0, 1]
  float scale = 0;  // 1 / temperature; 0: greedy
  int32_t top_k = 0;  // 0: all
  int32_t sample_index = 0;
  int32_t want_logprob = 0;  // 0 or 1
  int32_t first_masked = 0;  // its share of masked_tokens: tokens that may not come
  int32_t num_masked = 0;  // 0..kMaxMaskedTokens
};

inline constexpr int32_t kMaxMaskedTokens = 64;
inline constexpr int32_t kMaxSampleVocab = 1 << 19;  // sums of weights fit 64 bits
inline constexpr int32_t kMaxNormSize = 16384;  // a block keeps a row in registers

struct SampledToken {
  TokenId token = -1;
  int32_t failed = 0;  // 1: a NaN or +inf in the row, or no token that may come; token is -1 then
  float logprob = 0;  // of the token in the row as it came, before masks and temperature; 0 if not wanted
};

struct SampleBatchParams {
  float* logits = nullptr;  // [num_rows, vocab_size]; overwritten while a row is masked, then restored
  const SampleRowParams* rows = nullptr;  // [num_rows]
  const int32_t* row_indices = nullptr;  // [num_sampled]: the rows to sample; null: all num_rows
  const TokenId* masked_tokens = nullptr;  // ids in 0..vocab_size - 1, no id twice in a row's share
  SampledToken* out = nullptr;  // [num_rows]
  int32_t num_rows = 0;
  int32_t num_sampled = 0;
  int32_t vocab_size = 0;  // at most kMaxSampleVocab
};

// cudaErrorNoKernelImageForDevice if this build has no code for the device.
int probe();

int embedding(const EmbeddingParams& params, const void* table /* [vocab, hidden_size] */, DType table_dtype,
              CudaStream stream);
int rms_norm(const RmsNormParams& params, CudaStream stream);
int rope_kv_write(const RopeKvWriteParams& params, CudaStream stream);
int silu_mul(const SiluMulParams& params, CudaStream stream);
int gather_rows(const float* in, const int32_t* rows, float* out, int32_t num_rows, int32_t size, CudaStream stream);
int transfer_blocks(const TransferBlocksParams& params, CudaStream stream);
int gemm(const GemmParams& params, CudaStream stream);
GemmTile choose_gemm_tile(int32_t num_rows, int32_t out_features);  // the one that gemm() takes
int gemm_with_tile(const GemmParams& params, GemmTile tile, CudaStream stream);
int linear_epilogue(const LinearEpilogueParams& params, CudaStream stream);
// Small items have at most kAttentionSmallRows rows, others at most kAttentionItemRows.
// Shared memory that a block needs, in bytes; 0: no kernel takes that head_dim.
int attention_shared_bytes(int32_t head_dim);
int attention(const AttentionParams& params, const AttentionPartials& partials, CudaStream stream);
int sample(const SampleBatchParams& params, CudaStream stream);

}  // namespace cuda
}  // namespace steploop
