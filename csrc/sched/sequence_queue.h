// The waiting queue: an intrusive list through the sequences, so that joining, leaving from anywhere and going back to
// the front are O(1) and allocate nothing.
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

  void push_front(Sequence& sequence) { link(sequence, nullptr, head_); }
  void push_back(Sequence& sequence) { link(sequence, tail_, nullptr); }

  void remove(Sequence& sequence) {
    SL_DCHECK(size_ > 0 && (sequence.previous_waiting || head_ == &sequence), "sequence is not in the queue");
    (sequence.previous_waiting ? sequence.previous_waiting->next_waiting : head_) = sequence.next_waiting;
    (sequence.next_waiting ? sequence.next_waiting->previous_waiting : tail_) = sequence.previous_waiting;
    sequence.previous_waiting = sequence.next_waiting = nullptr;
    --size_;
  }

 private:
  void link(Sequence& sequence, Sequence* previous, Sequence* next) {
    sequence.previous_waiting = previous;
    sequence.next_waiting = next;
    (previous ? previous->next_waiting : head_) = &sequence;
    (next ? next->previous_waiting : tail_) = &sequence;
    ++size_;
  }

  Sequence* head_ = nullptr;
  Sequence* tail_ = nullptr;
  int32_t size_ = 0;
};

}  // namespace steploop
