// All that wait to run: those that never started, in the order configured, and those that were preempted.
#pragma once

#include <cstdint>
#include <memory>

#include "sched/queue_order.h"
#include "sched/sequence_queue.h"

namespace steploop {

// Preempted sequences go before those that never started, unless these are of a higher class: their work is half done.
// Starvation is bounded: whoever has waited longest among those that never started sees at most max_bypass others of
// its class start before it; then it is the next, whatever the order says.
class WaitingQueue {
 public:
  WaitingQueue(const SchedulerConfig& config, const BlockManager& blocks);

  int32_t size() const { return arrivals_.size() + preempted_.size(); }
  bool empty() const { return size() == 0; }
  const SequenceQueue& arrivals() const { return arrivals_; }    // never started, in order of arrival
  const SequenceQueue& preempted() const { return preempted_; }  // by class, then arrival
  QueueOrder& order() { return *order_; }

  int32_t num_requests() const { return num_requests_; }  // never started; samples of one request count once
  int64_t num_tokens() const { return num_tokens_; }      // of their prompts
  int64_t num_bypasses() const { return num_bypasses_; }  // starts of others than the longest-waiting, within a class

  void add(Sequence& sequence);
  void add_preempted(Sequence& sequence);
  Sequence* next() const;  // null when empty
  void start(Sequence& sequence);  // takes next() out
  void remove(Sequence& sequence);  // any, to end it

 private:
  void count(const Sequence& sequence, int32_t sign);

  const int32_t max_bypass_;
  std::unique_ptr<QueueOrder> order_;
  SequenceQueue arrivals_;
  SequenceQueue preempted_;
  int32_t num_requests_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_bypasses_ = 0;
};

// By class, then arrival.
bool is_before(const Sequence& a, const Sequence& b);

}  // namespace steploop
