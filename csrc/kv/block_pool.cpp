// The block pool's free list and reference counts.
#include "kv/block_pool.h"

#include <random>
#include <utility>

namespace steploop {

BlockPool::BlockPool(int32_t num_blocks) {
  if (num_blocks < 0) throw InvalidArgumentError(concat("num_blocks must be >= 0, got ", num_blocks));
  blocks_.resize(static_cast<size_t>(num_blocks));
  for (BlockId block = 0; block < num_blocks; ++block) push_back(block);
}

void BlockPool::push_front(BlockId block) {
  Block& record = at(block);
  record.previous = kNoBlock;
  record.next = free_head_;
  (free_head_ == kNoBlock ? free_tail_ : at(free_head_).previous) = block;
  free_head_ = block;
  ++num_free_;
}

void BlockPool::push_back(BlockId block) {
  Block& record = at(block);
  record.previous = free_tail_;
  record.next = kNoBlock;
  (free_tail_ == kNoBlock ? free_head_ : at(free_tail_).next) = block;
  free_tail_ = block;
  ++num_free_;
}

void BlockPool::unlink(BlockId block) {
  Block& record = at(block);
  (record.previous == kNoBlock ? free_head_ : at(record.previous).next) = record.next;
  (record.next == kNoBlock ? free_tail_ : at(record.next).previous) = record.previous;
  record.previous = record.next = kNoBlock;
  --num_free_;
}

BlockId BlockPool::allocate() {
  SL_CHECK(num_free_ > 0, "no free block");
  const BlockId block = free_head_;
  unlink(block);
  at(block).ref_count = 1;
  return block;
}

void BlockPool::take(BlockId block) {
  SL_CHECK(block >= 0 && block < num_blocks() && at(block).ref_count == 0, "block ", block, " is not free");
  unlink(block);
  at(block).ref_count = 1;
}

void BlockPool::add_ref(BlockId block) {
  SL_CHECK(block >= 0 && block < num_blocks() && at(block).ref_count > 0, "block ", block, " is not in use");
  ++at(block).ref_count;
}

bool BlockPool::release(BlockId block, bool keep_content) {
  SL_CHECK(block >= 0 && block < num_blocks() && at(block).ref_count > 0, "block ", block, " is not in use");
  if (--at(block).ref_count > 0) return false;
  if (keep_content)
    push_back(block);
  else
    push_front(block);
  return true;
}

void BlockPool::shuffle_free_list(uint64_t seed) {
  std::vector<BlockId> order;
  for (BlockId block = free_head_; block != kNoBlock; block = at(block).next) order.push_back(block);
  // Not std::shuffle: its order differs between standard libraries, and a seed should mean one order.
  std::mt19937_64 random(seed);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  free_head_ = free_tail_ = kNoBlock;
  num_free_ = 0;
  for (BlockId block : order) push_back(block);
}

void BlockPool::check_integrity() const {
  int32_t listed = 0;
  BlockId previous = kNoBlock;
  for (BlockId block = free_head_; block != kNoBlock; block = at(block).next) {
    SL_CHECK(block >= 0 && block < num_blocks(), "free list points to block ", block);
    SL_CHECK(at(block).ref_count == 0, "free block ", block, " has ", at(block).ref_count, " references");
    SL_CHECK(at(block).previous == previous, "free block ", block, " has a wrong previous link");
    SL_CHECK(++listed <= num_blocks(), "the free list has a cycle");
    previous = block;
  }
  SL_CHECK(free_tail_ == previous, "the free list ends at ", previous, ", not at its tail ", free_tail_);
  SL_CHECK(listed == num_free_, listed, " blocks in the free list, ", num_free_, " counted");

  int32_t unreferenced = 0;
  for (const Block& record : blocks_) {
    SL_CHECK(record.ref_count >= 0, "negative reference count");
    unreferenced += record.ref_count == 0;
  }
  SL_CHECK(unreferenced == num_free_, unreferenced, " blocks without reference, ", num_free_, " in the free list");
}

}  // namespace steploop
