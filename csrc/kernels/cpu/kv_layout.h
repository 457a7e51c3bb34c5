// Where a key or value element lives inside a CPU KV block.
#pragma once

#include <algorithm>

#include "kernels/params.h"

namespace steploop {

// Per block and kv head: keys, then values, head_dim * block_size elements each; of int8, codes plus 128, then one
// float32 scale per token for the keys, then one per token for the values.
//   keys:   [token group][word of head_dim][tokens of the group][per_word]  groups of 16 tokens (8 when block_size is 8)
//   values: [token / per_word][head_dim][per_word]
// where a word is 4 bytes, 1 float32, 2 bfloat16 or 4 int8: the order in which the micro-kernel reads its b operand.
struct KvLayout {
  explicit KvLayout(const KvCacheView& kv)
      : element_bytes(static_cast<int32_t>(dtype_size(kv.dtype))),
        per_word(4 / element_bytes),
        group_tokens(std::min(kv.block_size, 16)),
        head_dim(kv.head_dim),
        block_size(kv.block_size),
        half_bytes(static_cast<int64_t>(kv.head_dim) * kv.block_size * element_bytes),
        scale_bytes(kv.dtype == DType::kInt8 ? kv.block_size * int64_t{4} : 0) {}

  int64_t head_bytes() const { return 2 * (half_bytes + scale_bytes); }
  int64_t key_group_bytes() const { return static_cast<int64_t>(head_dim) / per_word * group_tokens * 4; }
  // Byte offsets within the head's part of a block.
  int64_t key_word(int32_t token, int32_t word) const {
    return token / group_tokens * key_group_bytes() +
           (static_cast<int64_t>(word) * group_tokens + token % group_tokens) * 4;
  }
  int64_t value_element(int32_t token, int32_t dim) const {
    return half_bytes + (static_cast<int64_t>(token / per_word) * head_dim + dim) * 4 +
           token % per_word * element_bytes;
  }
  int64_t key_scale(int32_t token) const { return 2 * half_bytes + token * int64_t{4}; }
  int64_t value_scale(int32_t token) const { return key_scale(token) + scale_bytes; }

  int32_t element_bytes;
  int32_t per_word;
  int32_t group_tokens;
  int32_t head_dim;
  int32_t block_size;
  int64_t half_bytes;   // keys, or values, of one head in one block
  int64_t scale_bytes;  // of its keys, or values
};

inline int64_t kv_block_bytes(const KvCacheView& kv) { return KvLayout(kv).head_bytes() * kv.num_kv_heads; }

inline char* kv_head(const KvCacheView& kv, BlockId block, int32_t kv_head_index) {
  return static_cast<char*>(kv.data) + block * kv.block_bytes + kv_head_index * (kv.block_bytes / kv.num_kv_heads);
}

}  // namespace steploop
