// The packed inputs of one forward pass, as views; the arrays live as long as the pass.
#pragma once

#include <cstdint>

#include "core/types.h"
#include "kernels/params.h"

namespace steploop {

struct ForwardBatch {
  int32_t num_tokens = 0;     // T
  int32_t num_sequences = 0;  // B
  int32_t num_sample_rows = 0;  // S, 0..T
  const TokenId* token_ids = nullptr;        // [T]
  const int32_t* positions = nullptr;        // [T]
  const int64_t* slot_mapping = nullptr;     // [T]
  const int32_t* cu_seqlens_q = nullptr;     // [B + 1]: sequence i's tokens are rows cu_seqlens_q[i] .. [i + 1]
  const int32_t* seq_lens = nullptr;         // [B]: tokens in the cache after this pass
  const BlockId* block_tables = nullptr;     // [G][B, block_table_stride]; G KV groups, 1 today
  int64_t block_table_stride = 0;
  int64_t block_table_group_stride = 0;
  const int32_t* sample_rows = nullptr;      // [S], increasing
  int32_t num_scored_rows = 0;  // P: rows whose logits say how likely the prompt's next token was
  const int32_t* scored_rows = nullptr;      // [P]
  AttentionWork attention;         // all tokens: out_row equals query_row
  AttentionWork sample_attention;  // sampled rows only: out_row counts sample rows
};

}  // namespace steploop
