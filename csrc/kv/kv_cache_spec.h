// What one KV group stores per token. One group today; sliding-window and hybrid models will have several.
#pragma once

#include <cstdint>

namespace steploop {

struct KvCacheSpec {
  int32_t num_layers = 0;
  int64_t bytes_per_token = 0;  // over all layers of the group, keys and values
  int32_t window = 0;           // tokens; 0: the whole context
};

// The only way KV moves: copy-on-write, swap, offload, hand-over between engines.
struct BlockTransfer {
  int32_t src_pool = 0;
  int32_t src_block = 0;
  int32_t dst_pool = 0;
  int32_t dst_block = 0;
};

}  // namespace steploop
