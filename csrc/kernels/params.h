// Arguments of every kernel, as plain structs shared by all backends. Strides are in elements.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace steploop {

// One layer's part of the KV cache. The layout inside a block belongs to the backend.
struct KvCacheView {
  void* data = nullptr;  // num_blocks * block_bytes
  DType dtype = DType::kFloat32;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 0;   // tokens
  int64_t block_bytes = 0;  // keys and values of all kv heads of this layer
};

// What queries are in, beside a KV cache of `kv` type.
inline constexpr DType query_dtype(DType kv) { return kv == DType::kInt8 ? DType::kFloat32 : kv; }

struct EmbeddingParams {
  const TokenId* token_ids = nullptr;  // [num_tokens]
  float* out = nullptr;                // [num_tokens, hidden_size]
  int32_t num_tokens = 0;
  int32_t hidden_size = 0;
};

// Rows in 8 bits: value = scale * code, code -127..127. A row with a value that is not finite has the scale NaN and codes 0.
struct QuantizedRows {
  int8_t* codes = nullptr;       // [num_rows, stride]
  float* scales = nullptr;       // [num_rows]
  int32_t* sums = nullptr;       // [num_rows]: of a row's codes
  float* group_sums = nullptr;   // [num_rows, stride / kInt4Group]: of each group's codes, whole numbers
  int64_t stride = 0;            // a row's codes, padded with zeros: a multiple of kRowStep

  static constexpr int64_t kRowStep = 64;
};

// Rotating a row of `size` multiplies it, before it is quantised, by a Hadamard matrix over so many runs of 16 elements:
// run i of a block becomes the sum of +-run j over the block, divided by the square root of their number. It spreads a
// single large element over many. The weight's rows are rotated alike when it is loaded, which leaves the product as it
// was (QuaRot: Ashkboos et al., 2024). 1: nothing to rotate.
inline constexpr int32_t rotation_runs(int32_t size) {
  int32_t runs = 1;
  while (runs < 64 && size % (2 * runs * 16) == 0) runs *= 2;
  return runs;
}

struct QuantizeRowsParams {
  const void* x = nullptr;  // [num_rows, size] of dtype float32 or bfloat16
  DType dtype = DType::kFloat32;
  QuantizedRows out{};
  int32_t num_rows = 0;
  int32_t size = 0;
  bool rotate = false;         // the size must be a multiple of 16
  float* scratch = nullptr;    // [size], the caller's own: for rotating
};

// out = (x [+ residual]) / rms(x [+ residual]) * weight; with a residual, x is replaced by the sum.
struct RmsNormParams {
  float* x = nullptr;               // [num_rows, size]
  const float* residual = nullptr;  // [num_rows, size] or null
  const float* weight = nullptr;    // [size]
  void* out = nullptr;              // [num_rows, size] of out_dtype
  DType out_dtype = DType::kFloat32;
  QuantizedRows quantized{};        // with codes: the result goes there instead of to out
  int32_t num_rows = 0;
  int32_t size = 0;
  float eps = 0;
};

enum class Epilogue : uint8_t {
  kStore,    // out = a w^T + bias
  kAdd,      // out += a w^T + bias
  kSiluMul,  // out = silu(gate) * up, gate and up being the two interleaved halves of w (see PackedLinear)
};

// The weight itself (packed, backend-owned) travels beside this.
struct LinearParams {
  const void* a = nullptr;      // [num_rows, in_features] of the weight's dtype, unless the weight is quantised
  void* out = nullptr;          // [num_rows, out_features]; float32, or out_dtype for kSiluMul
  int64_t out_stride = 0;
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  Epilogue epilogue = Epilogue::kStore;
  QuantizedRows quantized{};    // the input of a quantised weight, instead of a
};

// Splits a projected row into heads, normalises q and k (optional), rotates them, writes q out and k, v to the cache.
struct RopeKvWriteParams {
  const float* qkv = nullptr;             // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  const int32_t* positions = nullptr;     // [num_tokens]
  const int64_t* slot_mapping = nullptr;  // [num_tokens]: block * block_size + offset
  const float* cos = nullptr;             // [max_position, head_dim / 2]
  const float* sin = nullptr;             // [max_position, head_dim / 2]
  const float* q_norm = nullptr;          // [head_dim] or null
  const float* k_norm = nullptr;          // [head_dim] or null
  float norm_eps = 0;
  void* q = nullptr;                      // [num_tokens, num_heads, head_dim] of query_dtype(kv.dtype)
  KvCacheView kv;
  int32_t num_tokens = 0;
  int32_t num_heads = 0;
};

// A unit of attention work: consecutive query tokens of one sequence, all heads that share one kv head. A row is a
// query token times one of these heads: row = token * heads per kv head + head.
struct AttentionItem {
  int32_t sequence = 0;        // row of block_tables
  int32_t query_row = 0;       // first row of q
  int32_t out_row = 0;         // first row of out
  int32_t num_rows = 0;        // query tokens
  int32_t first_position = 0;  // of the first query token; a token attends to positions 0..its own
  int32_t kv_head = 0;
  // An item cut along its keys owns splits [first_split, first_split + num_splits) and leaves each one's partial
  // result at partial rows partial_row + i * rows + row, i counting its own splits.
  int32_t first_split = 0;
  int32_t num_splits = 0;      // 0: not cut; all keys, and the result goes to out
  int32_t partial_row = -1;
};

// Brings the partial results of one item's splits together, in order of position.
struct AttentionMerge {
  int32_t out_row = 0;
  int32_t num_rows = 0;     // query tokens
  int32_t kv_head = 0;
  int32_t num_splits = 0;
  int32_t partial_row = 0;  // of split 0; split i follows at partial_row + i * rows
};

// What one attention call has to do.
struct AttentionWork {
  const AttentionItem* items = nullptr;    // [num_items]
  int32_t num_items = 0;
  int32_t num_small = 0;                   // so many of the first items have few rows (see AttentionPlanLimits)
  const AttentionMerge* merges = nullptr;  // [num_merges]
  int32_t num_merges = 0;
};

struct AttentionParams {
  const void* q = nullptr;                // [num_tokens, num_heads, head_dim] of query_dtype(kv.dtype)
  KvCacheView kv;
  const BlockId* block_tables = nullptr;  // [num_sequences, block_table_stride]
  int64_t block_table_stride = 0;
  AttentionWork work;
  void* out = nullptr;                    // [num_rows, num_heads, head_dim] of out_dtype
  DType out_dtype = DType::kFloat32;
  int32_t num_heads = 0;
  float scale = 0;
};

struct SiluMulParams {
  const float* gate_up = nullptr;  // [num_rows, 2 * size]: runs of `group` columns of gate, then as many of up
  void* out = nullptr;             // [num_rows, size] of out_dtype
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  int32_t size = 0;
  int32_t group = 0;  // divides size; 0: size
};

}  // namespace steploop
