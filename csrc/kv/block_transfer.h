// The only way KV moves: copy-on-write, swap, offload, hand-over between engines.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace steploop {

inline constexpr int32_t kDevicePool = 0;
inline constexpr int32_t kHostPool = 1;

// Copies one block onto another, all layers. Transfers of a step happen in order, each seeing what those before it did,
// and all before the step's kernels.
struct BlockTransfer {
  int32_t src_pool = kDevicePool;
  BlockId src_block = kNoBlock;
  int32_t dst_pool = kDevicePool;
  BlockId dst_block = kNoBlock;
};

}  // namespace steploop
