// An intrusive list through sequences: joining and leaving anywhere are O(1) and allocate
// nothing. A sequence is in one such list at a time.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "sched/sequence.h"

namespace steploop {

class SequenceQueue {
 public:
  Sequence* front() const { return head_; }
  int32_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  void push_back(Sequence& sequence) { link(sequence, tail_, nullptr); }
  void insert_before(Sequence& sequence, Sequence* next) { link(sequence, next ? next->previous_queued : tail_, next); }

  void remove(Sequence& sequence) {
    SL_DCHECK(size_ > 0 && (sequence.previous_queued || head_ == &sequence), "sequence is not in the queue");
    (sequence.previous_queued ? sequence.previous_queued->next_queued : head_) = sequence.next_queued;
    (sequence.next_queued ? sequence.next_queued->previous_queued : tail_) = sequence.previous_queued;
    sequence.previous_queued = sequence.next_queued = nullptr;
    --size_;
  }

 private:
  void link(Sequence& sequence, Sequence* previous, Sequence* next) {
    sequence.previous_queued = previous;
    sequence.next_queued = next;
    (previous ? previous->next_queued : head_) = &sequence;
    (next ? next->previous_queued : tail_) = &sequence;
    ++size_;
  }

  Sequence* head_ = nullptr;
  Sequence* tail_ = nullptr;
  int32_t size_ = 0;
};

}  // namespace steploop
