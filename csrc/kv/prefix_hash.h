// The hash of a full KV block: what came before it, its tokens and an extra key.
#pragma once

#include <cstdint>
#include <span>

#include "core/types.h"

namespace steploop {

using BlockHash = uint64_t;

// parent names all tokens before these: an entry's serial in PrefixCache.
BlockHash hash_block(uint64_t parent, std::span<const TokenId> tokens, uint64_t extra_key);

}  // namespace steploop
