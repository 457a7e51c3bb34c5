// The chained hash of a full KV block: its parent's hash, its tokens and an extra key.
#pragma once

#include <cstdint>
#include <span>

#include "core/types.h"
#include "kv/block_pool.h"

namespace steploop {

// Never kNoHash. A first block has parent kNoHash.
BlockHash hash_block(BlockHash parent, std::span<const TokenId> tokens, uint64_t extra_key);

}  // namespace steploop
