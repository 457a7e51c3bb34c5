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

// What the codes of a row and group stand for: value = scale * code. kInt4: one for each group of the weight, though the
// scale is the same for all of a quantized_input_group.
struct RowGroup {
  float scale = 0;  // NaN where a value is not finite; then the codes are 0
  int32_t term = 0;  // what the product with a weight of the group's format needs beside the codes

  int32_t offset() const { return term; }                               // kInt8: what its sum begins with
  float sum() const { return __builtin_bit_cast(float, term); }         // kInt4: of what the codes stand for
};

// Inputs of linear layers are rotated before they are quantised: each run of so many is multiplied by a Hadamard matrix,
// divided by the square root of its size. It spreads a single large element over the run. The weight's rows are rotated
// alike when it is loaded, which leaves the product as it was (QuaRot: Ashkboos et al., 2024).
inline constexpr int32_t kMaxRotation = 64;
inline constexpr int32_t rotation_size(int64_t in_features) {  // the largest power of two that divides it
  const int64_t power = in_features & -in_features;
  return static_cast<int32_t>(power < kMaxRotation ? power : kMaxRotation);
}

// Rows in 8 bits, in the groups that the weight they are for has: codes -127..127.
struct QuantizedRows {
  int8_t* codes = nullptr;     // [num_rows, stride]: a row's, padded with zeros to whole groups
  RowGroup* groups = nullptr;  // [num_rows, groups_stride]: one for each group of the weight
  // The same for all that share this memory, whatever their size and format, since threads may be at different ones.
  int64_t stride = 0;
  int64_t groups_stride = 0;
  Quantization format = Quantization::kInt8;
  int32_t group_size = 0;      // that have a scale: quantized_input_group of the row's size
  int32_t rotation = 1;        // 1: none, or rotation_size of the row's size

  static constexpr int64_t kRowStep = 64;
  static_assert(kRowStep % kInt4Group == 0 && kRowStep % kMaxRotation == 0 && kMaxInputGroup % kRowStep == 0);
  // For rows of `size` elements, which are inputs of such a weight.
  void set_format(LinearFormat weight, int64_t size) {
    format = weight.quantization;
    group_size = static_cast<int32_t>(quantized_input_group(format, size));
    rotation = weight.rotated ? rotation_size(size) : 1;
  }
  // Of rows of up to `size` elements.
  void set_strides(int64_t size) {
    stride = (size + kRowStep - 1) / kRowStep * kRowStep;
    groups_stride = stride / kInt4Group;
  }
};

struct QuantizeRowsParams {
  const void* x = nullptr;  // [num_rows, size] of dtype float32 or bfloat16
  DType dtype = DType::kFloat32;
  QuantizedRows out{};
  int32_t num_rows = 0;
  int32_t size = 0;
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
  const void* a = nullptr;      // [num_rows, in_features] of linear_input_dtype, unless the weight is quantised
  void* out = nullptr;          // [num_rows, out_features]; float32, or out_dtype for kSiluMul
  int64_t out_stride = 0;
  DType out_dtype = DType::kFloat32;
  int32_t num_rows = 0;
  Epilogue epilogue = Epilogue::kStore;
  QuantizedRows quantized{};    // the input of a quantised weight, instead of a
};

// Logits of a quantised output layer are noisy, and the noise tells only where several are about the largest. So the
// largest of each row are computed again, from the same inputs and the rows that were not quantised: all that are at
// least as large as the largest of the kRescoreCandidates-th best block of the vocabulary, kMaxRescored at most.
inline constexpr int32_t kRescoreBlock = 256;
inline constexpr int32_t kRescoreCandidates = 16;
inline constexpr int32_t kMaxRescored = 512;
inline constexpr int32_t rescore_blocks(int32_t vocab_size) { return (vocab_size + kRescoreBlock - 1) / kRescoreBlock; }

// The rows [vocab_size, hidden_size] travel beside this.
struct RescoreParams {
  const void* inputs = nullptr;  // [num_rows, hidden_size] of input_dtype
  DType input_dtype = DType::kFloat32;
  float* logits = nullptr;       // [num_rows, vocab_size]
  int32_t num_rows = 0;
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
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
