// The table of full KV blocks, found by what they were computed from.
#include "kv/prefix_cache.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "kv/prefix_hash.h"

namespace steploop {

PrefixCache::PrefixCache(int32_t num_blocks, int32_t block_size, uint64_t hash_mask)
    : block_size_(block_size),
      hash_mask_(hash_mask),
      entries_(static_cast<size_t>(num_blocks)),
      tokens_(static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size)),
      buckets_(std::bit_ceil(static_cast<size_t>(num_blocks)), kNoBlock) {}

std::span<const TokenId> PrefixCache::tokens_of(BlockId block) const {
  const auto size = static_cast<size_t>(block_size_);
  return {tokens_.data() + static_cast<size_t>(block) * size, size};
}

uint32_t PrefixCache::bucket_of(const Key& key) const {
  const BlockHash hash = hash_block(key.parent, key.tokens, key.cache_key) & hash_mask_;
  return static_cast<uint32_t>(hash & (buckets_.size() - 1));
}

BlockId PrefixCache::find_in(uint32_t bucket, const Key& key) const {
  for (BlockId block = buckets_[bucket]; block != kNoBlock; block = entries_[static_cast<size_t>(block)].next) {
    const Entry& entry = entries_[static_cast<size_t>(block)];
    if (entry.parent == key.parent && entry.cache_key == key.cache_key &&
        std::ranges::equal(tokens_of(block), key.tokens))
      return block;
  }
  return kNoBlock;
}

BlockId PrefixCache::find(const Key& key) const { return find_in(bucket_of(key), key); }

BlockId PrefixCache::find_or_insert(BlockId block, const Key& key) {
  SL_CHECK(!contains(block), "block ", block, " has an entry");
  const uint32_t bucket = bucket_of(key);
  if (const BlockId known = find_in(bucket, key); known != kNoBlock) return known;
  entries_[static_cast<size_t>(block)] = {++last_serial_, key.parent, key.cache_key, buckets_[bucket], bucket};
  std::ranges::copy(key.tokens, tokens_.begin() + static_cast<ptrdiff_t>(block) * block_size_);
  buckets_[bucket] = block;
  ++size_;
  return block;
}

void PrefixCache::erase(BlockId block) {
  SL_CHECK(contains(block), "block ", block, " has no entry");
  Entry& entry = entries_[static_cast<size_t>(block)];
  BlockId* link = &buckets_[entry.bucket];
  while (*link != block) link = &entries_[static_cast<size_t>(*link)].next;
  *link = entry.next;
  entry = {};
  --size_;
}

void PrefixCache::clear() {
  std::ranges::fill(entries_, Entry{});
  std::ranges::fill(buckets_, kNoBlock);
  size_ = 0;
}

void PrefixCache::check_integrity() const {
  int32_t num_chained = 0;
  for (uint32_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (BlockId block = buckets_[bucket]; block != kNoBlock; block = entries_[static_cast<size_t>(block)].next) {
      SL_CHECK(block >= 0 && static_cast<size_t>(block) < entries_.size(), "a chain of the cache holds block ", block);
      SL_CHECK(++num_chained <= size_, "the chains of the cache hold more than its ", size_, " entries");
      const Entry& entry = entries_[static_cast<size_t>(block)];
      SL_CHECK(entry.serial != kRootSerial && entry.serial <= last_serial_ && entry.parent < entry.serial, "block ",
               block, " has serial ", entry.serial, " and parent ", entry.parent, " of ", last_serial_);
      const Key key{entry.parent, entry.cache_key, tokens_of(block)};
      SL_CHECK(entry.bucket == bucket && bucket_of(key) == bucket, "block ", block, " is in the wrong chain");
      SL_CHECK(find(key) == block, "blocks ", find(key), " and ", block, " have the same key");
    }
  }
  SL_CHECK(num_chained == size_, num_chained, " entries in the chains of the cache, ", size_, " counted");
  const auto num_entries = std::ranges::count_if(entries_, [](const Entry& entry) { return entry.serial != 0; });
  SL_CHECK(num_entries == size_, num_entries, " blocks with an entry, ", size_, " counted");
}

}  // namespace steploop
