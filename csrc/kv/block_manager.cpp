// Growing, trimming, hashing and checking block tables.
#include "kv/block_manager.h"

#include <bit>

#include "core/check.h"
#include "kv/prefix_hash.h"

namespace steploop {

BlockManager::BlockManager(int32_t num_blocks, int32_t block_size)
    : block_size_(block_size), block_shift_(std::countr_zero(static_cast<uint32_t>(block_size))), pool_(num_blocks) {
  if (block_size != 8 && block_size != 16 && block_size != 32 && block_size != 64)
    throw InvalidArgumentError(concat("block_size must be 8, 16, 32 or 64, got ", block_size));
}

bool BlockManager::append_blocks(BlockTable& table, int32_t num_blocks) {
  if (num_blocks > pool_.num_free()) return false;
  for (int32_t i = 0; i < num_blocks; ++i) table.blocks.push_back(pool_.allocate());
  return true;
}

void BlockManager::trim(BlockTable& table, int32_t num_tokens) {
  SL_CHECK(num_tokens >= 0);
  const int32_t num_kept = num_blocks_for(num_tokens);
  while (table.num_blocks() > num_kept) {
    pool_.release(table.blocks.back());
    table.blocks.pop_back();
  }
  // A block that lost some of its tokens is no longer full either.
  const int32_t num_full = num_tokens >> block_shift_;
  if (table.num_hashed_blocks <= num_full) return;
  if (num_full < table.num_blocks()) pool_.set_hash(table.blocks.back(), kNoHash);
  table.num_hashed_blocks = num_full;
}

void BlockManager::append_hashes(BlockTable& table, std::span<const TokenId> tokens, uint64_t extra_key,
                                 int32_t num_full) {
  SL_CHECK(num_full <= table.num_blocks(), tokens.size(), " tokens in ", table.num_blocks(), " blocks");
  BlockHash parent = kNoHash;
  if (table.num_hashed_blocks > 0) parent = pool_.hash(table.blocks[static_cast<size_t>(table.num_hashed_blocks - 1)]);
  for (int32_t i = table.num_hashed_blocks; i < num_full; ++i) {
    parent = hash_block(
        parent, tokens.subspan(static_cast<size_t>(i) << block_shift_, static_cast<size_t>(block_size_)), extra_key);
    pool_.set_hash(table.blocks[static_cast<size_t>(i)], parent);
    table.num_hashed_blocks = i + 1;
  }
}

void BlockManager::check_integrity(std::span<const BlockTable* const> tables) const {
  pool_.check_integrity();
  std::vector<bool> listed(static_cast<size_t>(pool_.num_blocks()));
  int32_t num_listed = 0;
  for (const BlockTable* table : tables) {
    SL_CHECK(table->num_hashed_blocks >= 0 && table->num_hashed_blocks <= table->num_blocks(), table->num_hashed_blocks,
             " hashed blocks of ", table->num_blocks());
    for (int32_t i = 0; i < table->num_blocks(); ++i) {
      const BlockId block = table->blocks[static_cast<size_t>(i)];
      SL_CHECK(block >= 0 && block < pool_.num_blocks(), "a table holds block ", block);
      SL_CHECK(!listed[static_cast<size_t>(block)], "block ", block, " is in two tables");
      SL_CHECK(pool_.ref_count(block) == 1, "block ", block, " has ", pool_.ref_count(block),
               " references and 1 table");
      SL_CHECK((pool_.hash(block) != kNoHash) == (i < table->num_hashed_blocks), "block ", block, " at index ", i,
               " disagrees with ", table->num_hashed_blocks, " hashed blocks");
      listed[static_cast<size_t>(block)] = true;
      ++num_listed;
    }
  }
  SL_CHECK(num_listed + pool_.num_free() == pool_.num_blocks(), num_listed, " blocks in tables, ", pool_.num_free(),
           " free, ", pool_.num_blocks(), " in all");
}

}  // namespace steploop
