// A pool of KV blocks: which are free, and how often each is referenced. Knows ids only, no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/types.h"

namespace steploop {

// Blocks are indices; the free list is intrusive (next/previous indices inside the block records), so that taking the
// next one, a given one out of the middle, and freeing are O(1) and allocate nothing.
// The list is in order of reuse: a block whose content may still be wanted goes to the back, any other to the front.
class BlockPool {
 public:
  // Throws InvalidArgumentError unless num_blocks >= 0.
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t num_free() const { return num_free_; }

  BlockId allocate();            // the front of the free list; ref count 1; SL_CHECKs that a block is free
  void take(BlockId block);      // a given free block; ref count 1
  void add_ref(BlockId block);   // of a block in use
  // True when the last reference went and the block is free: reused last if its content is worth keeping, else next.
  bool release(BlockId block, bool keep_content);
  int32_t ref_count(BlockId block) const { return at(block).ref_count; }

  // Puts the free list into a seeded random order: a test aid that shows results do not depend on block ids.
  void shuffle_free_list(uint64_t seed);

  // Walks the free list and all records; throws InternalError saying what is wrong.
  void check_integrity() const;

 private:
  struct Block {
    int32_t ref_count = 0;
    BlockId previous = kNoBlock;
    BlockId next = kNoBlock;
  };

  Block& at(BlockId block) {
    SL_DCHECK(block >= 0 && block < num_blocks(), "block ", block, " of ", num_blocks());
    return blocks_[static_cast<size_t>(block)];
  }
  const Block& at(BlockId block) const { return const_cast<BlockPool*>(this)->at(block); }
  void push_front(BlockId block);
  void push_back(BlockId block);
  void unlink(BlockId block);

  std::vector<Block> blocks_;
  BlockId free_head_ = kNoBlock;
  BlockId free_tail_ = kNoBlock;
  int32_t num_free_ = 0;
};

}  // namespace steploop
