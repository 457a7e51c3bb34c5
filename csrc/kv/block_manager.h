// Block tables of sequences over a pool: allocation, sharing (prefix cache, forks), and the way to the host and back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "kv/block_pool.h"
#include "kv/block_transfer.h"
#include "kv/prefix_cache.h"

namespace steploop {

// The entry that stands for a table's last cached block is not known (see BlockManager::uncache). No entry has this
// serial, and none has it as its parent.
inline constexpr CacheSerial kUnknownSerial = ~CacheSerial{0};

// One sequence's blocks in order of position. Reserve it for the longest the sequence can get, and growing allocates
// nothing. Full blocks may be shared with other tables; a block that will still be written is in one table only.
struct BlockTable {
  std::vector<BlockId> blocks;
  int32_t num_cached_blocks = 0;          // leading full blocks that were filed in, or found in, the prefix cache
  CacheSerial last_serial = kRootSerial;  // of the entry that stands for the last of them
  bool has_duplicates = false;            // some of them hold what an entry of another block stands for

  int32_t num_blocks() const { return static_cast<int32_t>(blocks.size()); }
};

// Leading blocks of a sequence that the prefix cache holds.
struct PrefixMatch {
  int32_t num_blocks = 0;
  int32_t num_idle_blocks = 0;  // of those, the ones that nobody references: they count as free until taken
};

struct BlockManagerConfig {
  int32_t num_blocks = 0;         // >= 1
  int32_t block_size = 16;        // tokens: 8, 16, 32 or 64
  int32_t num_host_blocks = 0;    // of the pool to swap to
  bool enable_prefix_caching = false;
  uint64_t prefix_hash_mask = ~uint64_t{0};  // see PrefixCache
};

// One table and what it must explain, for check_integrity.
struct TableUse {
  const BlockTable* table = nullptr;
  int32_t num_computed_tokens = 0;        // blocks from the one that holds this position on are the table's alone
  std::span<const BlockId> host_blocks;   // in the host pool
};

class BlockManager {
 public:
  // Throws InvalidArgumentError.
  explicit BlockManager(const BlockManagerConfig& config);

  const BlockManagerConfig& config() const { return config_; }
  int32_t block_size() const { return config_.block_size; }
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }
  const BlockPool& host_pool() const { return host_pool_; }
  int32_t num_free() const { return pool_.num_free(); }  // blocks that can be had, idle cached ones included
  int32_t num_idle_cached() const { return num_idle_cached_; }
  int32_t num_blocks_for(int32_t num_tokens) const {
    // 64 bits: num_tokens may be the largest int32.
    return static_cast<int32_t>((int64_t{num_tokens} + block_size() - 1) >> block_shift_);
  }
  int32_t num_full_blocks(int32_t num_tokens) const { return num_tokens >> block_shift_; }

  // Makes room for tokens [0, num_tokens) or changes nothing and returns false. Idle cached blocks are taken only when
  // no empty one is left, the least recently used first.
  bool grow(BlockTable& table, int32_t num_tokens) {
    const int32_t num_missing = num_blocks_for(num_tokens) - table.num_blocks();
    return num_missing <= 0 || append_blocks(table, num_missing);
  }

  // Gives all blocks back, tail first: of a sequence's cached blocks the tail, which is shared least, is reused first.
  void free(BlockTable& table);

  // ---- Prefix cache. All of it does nothing, and finds nothing, when prefix caching is off. ----

  // How much of `tokens` reuse_cached would find for an empty table. Full blocks only: to leave a token to compute,
  // pass all tokens but the last.
  PrefixMatch match_prefix(std::span<const TokenId> tokens, uint64_t cache_key) const;

  // Goes on from the table's num_cached_blocks: as long as the cache holds the block that comes next in `tokens`, the
  // table takes it, in the place of a block of its own that is not written yet, or at its end. Returns how many.
  // Nothing may be computed beyond num_cached_blocks.
  int32_t reuse_cached(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key);

  // Files the blocks that `tokens` now fill (all of them computed, or in the step being made). Where the cache already
  // has another block of the same key, that one stays the one to find.
  void cache_full_blocks(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key) {
    if (num_full_blocks(static_cast<int32_t>(tokens.size())) > table.num_cached_blocks)
      append_cached(table, tokens, cache_key);
  }

  // Takes the entries of this table's blocks out of the cache from token num_tokens on: what was announced will not be
  // computed, so that no other table may hold it (SL_CHECKed), or, with may_be_shared, it is not fit to be shared any
  // further. The chain goes on from the last block that is left. Where another block has the entry of that one, the
  // entry's serial is not known: then nothing more is filed or found for the table.
  void uncache(BlockTable& table, int32_t num_tokens, bool may_be_shared = false);

  // Puts the blocks that entries stand for in the place of this table's own of the same content, which go free: what was
  // computed twice is held once. Between steps only: both must be computed.
  void merge_duplicates(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key);

  void reset_prefix_cache();  // forgets every entry; blocks in use stay with their tables

  // ---- Sharing and moving ----

  // The empty table `child` gets the source's first num_tokens tokens: full blocks are shared; a last, partial one is
  // copied (the transfer is appended), since both go on writing into it: copy-on-write, the write being next. False,
  // changing nothing, when no block is free for that copy. Filing goes on as uncache() says.
  bool fork(const BlockTable& source, BlockTable& child, int32_t num_tokens, std::vector<BlockTransfer>& transfers);

  // Copies the blocks of the first num_tokens tokens to the host pool and frees the table. False, changing nothing,
  // when the host pool has too little room.
  bool swap_out(BlockTable& table, int32_t num_tokens, std::vector<BlockId>& host_blocks,
                std::vector<BlockTransfer>& transfers);

  // Brings host_blocks back into a table that holds at most some leading ones again (reuse_cached). False, changing
  // nothing, when too few blocks are free.
  bool swap_in(BlockTable& table, std::vector<BlockId>& host_blocks, std::vector<BlockTransfer>& transfers);
  void free_host(std::vector<BlockId>& host_blocks);

  // free + in use == total in both pools, every reference explained by the tables, nothing that will be written shared,
  // cache and pool agree. Throws InternalError.
  void check_integrity(std::span<const TableUse> uses) const;

 private:
  bool append_blocks(BlockTable& table, int32_t num_blocks);
  void append_cached(BlockTable& table, std::span<const TokenId> tokens, uint64_t cache_key);
  void cut_cached(BlockTable& table, int32_t num_blocks) const;
  PrefixCache::Key key_of(int32_t index, CacheSerial parent, std::span<const TokenId> tokens, uint64_t cache_key) const;
  bool has_entry(BlockId block) const { return config_.enable_prefix_caching && cache_.contains(block); }
  BlockId allocate();
  void reference(BlockId block);
  void release(BlockId block);
  // block_manager_integrity.cpp
  void check_table(const TableUse& use) const;
  void check_device_blocks(std::span<const TableUse> uses) const;
  void check_host_blocks(std::span<const TableUse> uses) const;

  BlockManagerConfig config_;
  int32_t block_shift_;  // block_size == 1 << block_shift: divisions on the step path are shifts
  BlockPool pool_;
  BlockPool host_pool_;
  PrefixCache cache_;
  int32_t num_idle_cached_ = 0;  // blocks with an entry that nobody references
};

}  // namespace steploop
