// Which KV blocks hold which tokens: full blocks found again by what they were computed from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace steploop {

// Names an entry for good: a serial is never given twice. So a key that holds its parent's serial stands for all the
// tokens before it, and comparing one block's key compares the whole prefix.
using CacheSerial = uint64_t;
inline constexpr CacheSerial kRootSerial = 0;  // the parent of a sequence's first block

// At most one entry per block of the pool, in a hash table with chains through the entries: nothing is allocated after
// construction. Keys are compared in full, so that a collision of hashes costs time and never shares a block.
class PrefixCache {
 public:
  // hash_mask: bits of the hash in use; a test aid that makes collisions common.
  PrefixCache(int32_t num_blocks, int32_t block_size, uint64_t hash_mask = ~uint64_t{0});

  struct Key {
    CacheSerial parent = kRootSerial;
    uint64_t cache_key = 0;            // salt, tenant, adapter: entries of different keys are different
    std::span<const TokenId> tokens;   // [block_size]
  };

  BlockId find(const Key& key) const;  // kNoBlock if there is none

  // The block with the key's entry: another one that has it already, else `block`, filed now. It must have no entry.
  BlockId find_or_insert(BlockId block, const Key& key);
  void erase(BlockId block);  // the block's entry
  void clear();

  bool contains(BlockId block) const { return entries_[static_cast<size_t>(block)].serial != kRootSerial; }
  CacheSerial serial(BlockId block) const { return entries_[static_cast<size_t>(block)].serial; }  // kRootSerial: none
  int32_t size() const { return size_; }

  // Every entry is found by its own key, and the chains hold no other. Throws InternalError.
  void check_integrity() const;

 private:
  struct Entry {
    CacheSerial serial = kRootSerial;
    CacheSerial parent = kRootSerial;
    uint64_t cache_key = 0;
    BlockId next = kNoBlock;  // of the chain
    uint32_t bucket = 0;
  };
  std::span<const TokenId> tokens_of(BlockId block) const;
  uint32_t bucket_of(const Key& key) const;
  BlockId find_in(uint32_t bucket, const Key& key) const;

  int32_t block_size_;
  uint64_t hash_mask_;
  CacheSerial last_serial_ = kRootSerial;
  int32_t size_ = 0;
  std::vector<Entry> entries_;  // by block
  std::vector<TokenId> tokens_;  // [num_blocks, block_size]
  std::vector<BlockId> buckets_;  // heads of the chains; a power of two of them
};

}  // namespace steploop
