// Growing, sharing and moving block tables, and what the prefix cache does for them.
#include "kv/block_manager.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace steploop {
namespace {

const BlockManagerConfig& validated(const BlockManagerConfig& config) {
  const auto require = [](bool holds, const char* what, int32_t value) {
    if (!holds) throw InvalidArgumentError(concat(what, ", got ", value));
  };
  const int32_t size = config.block_size;
  require(config.num_blocks >= 1, "num_kv_blocks must be >= 1", config.num_blocks);
  require(size == 8 || size == 16 || size == 32 || size == 64, "block_size must be 8, 16, 32 or 64", size);
  require(config.num_host_blocks >= 0, "num_host_blocks must be >= 0", config.num_host_blocks);
  return config;
}

}  // namespace

BlockManager::BlockManager(const BlockManagerConfig& config)
    : config_(validated(config)),
      block_shift_(std::countr_zero(static_cast<uint32_t>(config.block_size))),
      pool_(config.num_blocks),
      host_pool_(config.num_host_blocks),
      cache_(config.enable_prefix_caching ? config.num_blocks : 0, config.block_size, config.prefix_hash_mask) {}

// ---- Blocks ----

BlockId BlockManager::allocate() {
  const BlockId block = pool_.allocate();
  if (has_entry(block)) {
    cache_.erase(block);
    --num_idle_cached_;
  }
  return block;
}

void BlockManager::reference(BlockId block) {
  if (pool_.ref_count(block) > 0) return pool_.add_ref(block);
  pool_.take(block);
  if (has_entry(block)) --num_idle_cached_;
}

void BlockManager::release(BlockId block) {
  const bool is_cached = has_entry(block);
  if (pool_.release(block, is_cached) && is_cached) ++num_idle_cached_;
}

bool BlockManager::append_blocks(BlockTable& table, int32_t num_blocks) {
  if (num_blocks > num_free()) return false;
  for (int32_t i = 0; i < num_blocks; ++i) table.blocks.push_back(allocate());
  return true;
}

void BlockManager::free(BlockTable& table) {
  while (!table.blocks.empty()) {
    release(table.blocks.back());
    table.blocks.pop_back();
  }
  cut_cached(table, 0);
  table.has_duplicates = false;
}

// ---- Prefix cache ----

PrefixCache::Key BlockManager::key_of(int32_t index, CacheSerial parent, std::span<const TokenId> tokens,
                                      uint64_t cache_key) const {
  const auto size = static_cast<size_t>(block_size());
  return {parent, cache_key, tokens.subspan(static_cast<size_t>(index) * size, size)};
}

PrefixMatch BlockManager::match_prefix(std::span<const TokenId> tokens, uint64_t cache_key) const {
  PrefixMatch match;
  if (!config_.enable_prefix_caching) return match;
  const int32_t num_full = num_full_blocks(static_cast<int32_t>(tokens.size()));
  CacheSerial parent = kRootSerial;
  for (; match.num_blocks < num_full; ++match.num_blocks) {
    const BlockId block = cache_.find(key_of(match.num_blocks, parent, tokens, cache_key));
    if (block == kNoBlock) break;
    match.num_idle_blocks += pool_.ref_count(block) == 0;
    parent = cache_.serial(block);
  }
  return match;
}

int32_t BlockManager::reuse_cached(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key) {
  if (!config_.enable_prefix_caching) return 0;
  const int32_t first = table.num_cached_blocks;
  const int32_t num_full = num_full_blocks(static_cast<int32_t>(tokens.size()));
  for (int32_t i = first; i < num_full; ++i) {
    const BlockId block = cache_.find(key_of(i, table.last_serial, tokens, cache_key));
    if (block == kNoBlock) break;
    reference(block);
    if (i < table.num_blocks()) {
      BlockId& own = table.blocks[static_cast<size_t>(i)];
      SL_CHECK(pool_.ref_count(own) == 1 && !has_entry(own), "block ", own, " at index ", i, " is written already");
      release(own);
      own = block;
    } else {
      table.blocks.push_back(block);
    }
    table.last_serial = cache_.serial(block);
    table.num_cached_blocks = i + 1;
  }
  return table.num_cached_blocks - first;
}

void BlockManager::append_cached(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key) {
  if (!config_.enable_prefix_caching || table.last_serial == kUnknownSerial) return;
  const int32_t num_full = num_full_blocks(static_cast<int32_t>(tokens.size()));
  SL_CHECK(num_full <= table.num_blocks(), tokens.size(), " tokens in ", table.num_blocks(), " blocks");
  for (int32_t i = table.num_cached_blocks; i < num_full; ++i) {
    const BlockId own = table.blocks[static_cast<size_t>(i)];
    // Own blocks have an entry already when a fork that shares them was first.
    const BlockId filed =
        cache_.contains(own) ? own : cache_.find_or_insert(own, key_of(i, table.last_serial, tokens, cache_key));
    table.last_serial = cache_.serial(filed);
    table.has_duplicates |= filed != own;
  }
  table.num_cached_blocks = num_full;
}

void BlockManager::merge_duplicates(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key) {
  if (!table.has_duplicates) return;
  table.has_duplicates = false;
  CacheSerial parent = kRootSerial;
  for (int32_t i = 0; i < table.num_cached_blocks; ++i) {
    BlockId& own = table.blocks[static_cast<size_t>(i)];
    if (!cache_.contains(own)) {
      const BlockId filed = cache_.find(key_of(i, parent, tokens, cache_key));
      if (filed == kNoBlock) return;  // evicted since: the chain cannot be followed
      reference(filed);
      release(own);
      own = filed;
    }
    parent = cache_.serial(own);
  }
}

void BlockManager::uncache(BlockTable& table, int32_t num_tokens, bool may_be_shared) {
  SL_CHECK(num_tokens >= 0);
  const int32_t num_kept = num_full_blocks(num_tokens);
  for (int32_t i = num_kept; i < table.num_cached_blocks; ++i) {
    const BlockId block = table.blocks[static_cast<size_t>(i)];
    if (!has_entry(block)) continue;
    SL_CHECK(may_be_shared || pool_.ref_count(block) == 1, "block ", block, " was announced, is not computed, and has ",
             pool_.ref_count(block), " references");
    cache_.erase(block);
  }
  cut_cached(table, num_kept);
}

// Leaves at most num_blocks of the cached blocks to be counted as such.
void BlockManager::cut_cached(BlockTable& table, int32_t num_blocks) const {
  if (num_blocks >= table.num_cached_blocks) return;
  table.num_cached_blocks = num_blocks;
  table.last_serial = kRootSerial;
  if (num_blocks == 0) return;
  const BlockId last = table.blocks[static_cast<size_t>(num_blocks - 1)];
  table.last_serial = cache_.contains(last) ? cache_.serial(last) : kUnknownSerial;
}

void BlockManager::reset_prefix_cache() {
  cache_.clear();
  num_idle_cached_ = 0;
}

// ---- Sharing and moving ----

bool BlockManager::fork(const BlockTable& source, BlockTable& child, int32_t num_tokens,
                        std::vector<BlockTransfer>& transfers) {
  const int32_t num_full = num_full_blocks(num_tokens);
  const bool has_partial = num_blocks_for(num_tokens) > num_full;
  SL_CHECK(num_tokens >= 0 && num_blocks_for(num_tokens) <= source.num_blocks(), num_tokens, " tokens of ",
           source.num_blocks(), " blocks");
  SL_CHECK(child.blocks.empty(), "the child has ", child.num_blocks(), " blocks");
  if (has_partial && num_free() == 0) return false;
  for (int32_t i = 0; i < num_full; ++i) {
    const BlockId block = source.blocks[static_cast<size_t>(i)];
    reference(block);
    child.blocks.push_back(block);
  }
  child.num_cached_blocks = source.num_cached_blocks;
  child.last_serial = source.last_serial;
  cut_cached(child, num_full);
  if (has_partial) {
    child.blocks.push_back(allocate());
    transfers.push_back({kDevicePool, source.blocks[static_cast<size_t>(num_full)], kDevicePool, child.blocks.back()});
  }
  return true;
}

bool BlockManager::swap_out(BlockTable& table, int32_t num_tokens, std::vector<BlockId>& host_blocks,
                            std::vector<BlockTransfer>& transfers) {
  const int32_t num_moved = num_blocks_for(num_tokens);
  SL_CHECK(num_tokens >= 0 && num_moved <= table.num_blocks(), num_tokens, " tokens of ", table.num_blocks(),
           " blocks");
  SL_CHECK(host_blocks.empty(), host_blocks.size(), " blocks are swapped out already");
  if (num_moved > host_pool_.num_free()) return false;
  for (int32_t i = 0; i < num_moved; ++i) {
    host_blocks.push_back(host_pool_.allocate());
    transfers.push_back({kDevicePool, table.blocks[static_cast<size_t>(i)], kHostPool, host_blocks.back()});
  }
  free(table);
  return true;
}

bool BlockManager::swap_in(BlockTable& table, std::vector<BlockId>& host_blocks,
                           std::vector<BlockTransfer>& transfers) {
  const auto num_blocks = static_cast<int32_t>(host_blocks.size());
  const int32_t first = table.num_blocks();
  SL_CHECK(first <= num_blocks, first, " blocks in the table, ", num_blocks, " in the host pool");
  if (!append_blocks(table, num_blocks - first)) return false;
  for (int32_t i = first; i < num_blocks; ++i) {
    const auto index = static_cast<size_t>(i);
    transfers.push_back({kHostPool, host_blocks[index], kDevicePool, table.blocks[index]});
  }
  free_host(host_blocks);
  return true;
}

void BlockManager::free_host(std::vector<BlockId>& host_blocks) {
  for (const BlockId block : host_blocks) host_pool_.release(block, false);
  host_blocks.clear();
}

}  // namespace steploop
