// Queue orders: which of the sequences that never started goes next. `longest_prefix` compares the 64 longest-waiting.
#pragma once

#include <cstdint>
#include <memory>

#include "sched/scheduler_config.h"
#include "sched/sequence.h"
#include "sched/sequence_queue.h"

namespace steploop {

class QueueOrder {
 public:
  virtual ~QueueOrder() = default;

  // arrivals: all that wait, in order of arrival; the list is the caller's, and already (still) holds the sequence.
  virtual void add(Sequence&) {}
  virtual void remove(Sequence&) {}
  virtual Sequence* first(const SequenceQueue& arrivals) const = 0;  // null when empty; changes nothing
  virtual void on_start(Sequence&) {}                                 // of one that first() gave; remove() follows
  virtual void on_output(Sequence&) {}                                // an output token of one that runs
  virtual void on_end(Sequence&) {}                                   // it will not be seen again

  // Whether a higher class runs at the expense of a lower one: SequenceOptions::priority counts.
  virtual bool has_classes() const { return false; }
};

std::unique_ptr<QueueOrder> make_queue_order(QueueOrderKind kind, const BlockManager& blocks);

}  // namespace steploop
