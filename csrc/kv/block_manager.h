// Block tables of sequences over a pool: just-in-time allocation, freeing, hashes of full blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "kv/block_pool.h"

namespace steploop {

// One sequence's blocks in order of position. Reserve it for the longest the sequence can get, and growing allocates
// nothing.
struct BlockTable {
  std::vector<BlockId> blocks;
  int32_t num_hashed_blocks = 0;  // leading full blocks that carry their chained hash

  int32_t num_blocks() const { return static_cast<int32_t>(blocks.size()); }
};

class BlockManager {
 public:
  // block_size: 8, 16, 32 or 64 tokens; num_blocks >= 1. Throws InvalidArgumentError.
  BlockManager(int32_t num_blocks, int32_t block_size);

  int32_t block_size() const { return block_size_; }
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }
  int32_t num_blocks_for(int32_t num_tokens) const {
    // 64 bits: num_tokens may be the largest int32.
    return static_cast<int32_t>((int64_t{num_tokens} + block_size_ - 1) >> block_shift_);
  }

  // Makes room for tokens [0, num_tokens) or changes nothing and returns false.
  bool grow(BlockTable& table, int32_t num_tokens) {
    const int32_t num_missing = num_blocks_for(num_tokens) - table.num_blocks();
    return num_missing <= 0 || append_blocks(table, num_missing);
  }

  // Drops blocks past those that num_tokens needs (rejected lookahead slots), tail first.
  void trim(BlockTable& table, int32_t num_tokens);

  // Gives all blocks back, tail first: once freed blocks can be reused by their hash, a sequence's tail, which is
  // shared least, is overwritten first.
  void free(BlockTable& table) { trim(table, 0); }

  // Chains hashes over blocks that `tokens` (computed and in the cache) now fill. extra_key: salt or adapter.
  void hash_full_blocks(BlockTable& table, std::span<const TokenId> tokens, uint64_t extra_key = 0) {
    const auto num_full = static_cast<int32_t>(tokens.size() >> block_shift_);
    if (num_full > table.num_hashed_blocks) append_hashes(table, tokens, extra_key, num_full);
  }

  // free + in use == total, every reference explained by one of the tables, no block in two tables.
  void check_integrity(std::span<const BlockTable* const> tables) const;

 private:
  bool append_blocks(BlockTable& table, int32_t num_blocks);
  void append_hashes(BlockTable& table, std::span<const TokenId> tokens, uint64_t extra_key, int32_t num_full);

  int32_t block_size_;
  int32_t block_shift_;  // block_size == 1 << block_shift: divisions on the step path are shifts
  BlockPool pool_;
};

}  // namespace steploop
