// What one KV group stores per token. One group today; sliding-window and hybrid models will have several.
#pragma once

#include <cstdint>

namespace steploop {

struct KvCacheSpec {
  int32_t num_layers = 0;
  int64_t bytes_per_token = 0;  // over all layers of the group, keys and values
  int32_t window = 0;           // tokens; 0: the whole context
};

}  // namespace steploop
