// A binary heap of sequences that knows where each is, so that any can leave: O(log n), and no allocation but when it
// grows beyond its largest size so far.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/check.h"
#include "sched/sequence.h"

namespace steploop {

// Before(a, b): a leaves first. kIndex: the member that holds a sequence's place, -1 when it is not in the heap.
template <class Before, int32_t Sequence::* kIndex>
class SequenceHeap {
 public:
  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  Sequence* first() const { return items_.empty() ? nullptr : items_.front(); }

  void push(Sequence& sequence) {
    items_.push_back(&sequence);
    rise(items_.size() - 1);
  }

  void remove(Sequence& sequence) {
    const auto hole = static_cast<size_t>(sequence.*kIndex);
    SL_CHECK(hole < items_.size() && items_[hole] == &sequence, "sequence ", sequence.id, " is not in the heap");
    Sequence* last = items_.back();
    items_.pop_back();
    sequence.*kIndex = -1;
    if (last == &sequence) return;
    place(hole, last);
    rise(hole);
    sink(hole);
  }

 private:
  void place(size_t at, Sequence* sequence) {
    items_[at] = sequence;
    sequence->*kIndex = static_cast<int32_t>(at);
  }
  void rise(size_t at) {
    Sequence* sequence = items_[at];
    for (; at > 0 && Before{}(*sequence, *items_[(at - 1) / 2]); at = (at - 1) / 2) place(at, items_[(at - 1) / 2]);
    place(at, sequence);
  }
  void sink(size_t at) {
    Sequence* sequence = items_[at];
    for (size_t child; (child = 2 * at + 1) < items_.size(); at = child) {
      if (child + 1 < items_.size() && Before{}(*items_[child + 1], *items_[child])) ++child;
      if (!Before{}(*items_[child], *sequence)) break;
      place(at, items_[child]);
    }
    place(at, sequence);
  }

  std::vector<Sequence*> items_;
};

}  // namespace steploop
