// A pool of KV blocks: which are free, how often each is referenced, what each holds. Knows ids only, no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/types.h"

namespace steploop {

using BlockHash = uint64_t;
inline constexpr BlockHash kNoHash = 0;

// Blocks are indices; the free list is intrusive (next/previous indices inside the block records), so that taking,
// freeing and, later, taking a given block out of the middle are O(1) and allocate nothing.
// The free list is first in, first out: a freed block keeps its content (and hash) as long as possible.
class BlockPool {
 public:
  // Throws InvalidArgumentError unless num_blocks >= 1.
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t num_free() const { return num_free_; }

  BlockId allocate();               // ref count 1, no hash; SL_CHECKs that a block is free
  void add_ref(BlockId block);      // of a block in use
  bool release(BlockId block);      // true when the last reference went and the block is free again
  int32_t ref_count(BlockId block) const { return at(block).ref_count; }

  void set_hash(BlockId block, BlockHash hash);
  BlockHash hash(BlockId block) const { return at(block).hash; }  // kNoHash until the block is full

  // Puts the free list into a seeded random order: a test aid that shows results do not depend on block ids.
  void shuffle_free_list(uint64_t seed);

  // Walks the free list and all records; throws InternalError saying what is wrong.
  void check_integrity() const;

 private:
  struct Block {
    int32_t ref_count = 0;
    BlockId previous = kNoBlock;
    BlockId next = kNoBlock;
    BlockHash hash = kNoHash;
  };

  Block& at(BlockId block) {
    SL_DCHECK(block >= 0 && block < num_blocks(), "block ", block, " of ", num_blocks());
    return blocks_[static_cast<size_t>(block)];
  }
  const Block& at(BlockId block) const { return const_cast<BlockPool*>(this)->at(block); }
  void append_free(BlockId block);

  std::vector<Block> blocks_;
  BlockId free_head_ = kNoBlock;
  BlockId free_tail_ = kNoBlock;
  int32_t num_free_ = 0;
};

}  // namespace steploop
