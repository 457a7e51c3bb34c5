// WaitingQueue: who is next, and how often the longest-waiting one was passed.
#include "sched/waiting_queue.h"

#include "core/check.h"

namespace steploop {

bool is_before(const Sequence& a, const Sequence& b) {
  if (a.priority_class != b.priority_class) return a.priority_class < b.priority_class;
  return a.arrival_number < b.arrival_number;
}

WaitingQueue::WaitingQueue(const SchedulerConfig& config, const BlockManager& blocks)
    : max_bypass_(config.max_bypass), order_(make_queue_order(config.order, blocks)) {}

void WaitingQueue::count(const Sequence& sequence, int32_t sign) {
  if (!sequence.is_first_sample) return;
  num_requests_ += sign;
  num_tokens_ += sign * sequence.num_prompt_tokens;
}

void WaitingQueue::add(Sequence& sequence) {
  sequence.priority_class = order_->has_classes() ? sequence.options.priority : 0;
  arrivals_.push_back(sequence);
  order_->add(sequence);
  count(sequence, 1);
}

void WaitingQueue::add_preempted(Sequence& sequence) {
  // Victims mostly come latest first: the place is at or near the front.
  Sequence* next = preempted_.front();
  while (next && is_before(*next, sequence)) next = next->next_queued;
  preempted_.insert_before(sequence, next);
}

Sequence* WaitingQueue::next() const {
  Sequence* resumed = preempted_.front();
  Sequence* oldest = arrivals_.front();
  if (!oldest) return resumed;
  // Within a class of priority the order is that of arrival anyway.
  const bool waited_enough = !order_->has_classes() && oldest->num_bypasses >= max_bypass_;
  Sequence* first = waited_enough ? oldest : order_->first(arrivals_);
  return resumed && resumed->priority_class <= first->priority_class ? resumed : first;
}

void WaitingQueue::start(Sequence& sequence) {
  if (sequence.state != SequenceState::kPreempted) {
    order_->on_start(sequence);
    Sequence& oldest = *arrivals_.front();
    if (&oldest != &sequence && oldest.priority_class == sequence.priority_class) {
      ++oldest.num_bypasses;
      ++num_bypasses_;
    }
  }
  remove(sequence);
}

void WaitingQueue::remove(Sequence& sequence) {
  if (sequence.state == SequenceState::kPreempted) {
    preempted_.remove(sequence);
    return;
  }
  order_->remove(sequence);
  arrivals_.remove(sequence);
  count(sequence, -1);
}

}  // namespace steploop
