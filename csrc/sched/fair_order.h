// Deficit round-robin over tenants: each gets the same share of the engine's tokens while it has requests waiting.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "sched/queue_order.h"
#include "sched/sequence_heap.h"

namespace steploop {

struct EarlierArrival {
  bool operator()(const Sequence& a, const Sequence& b) const { return a.arrival_number < b.arrival_number; }
};

struct Tenant {
  SequenceHeap<EarlierArrival, &Sequence::heap_index> waiting;  // its own are served in order of arrival
  int64_t balance = 0;        // tokens it may still use; below 0 it has used more than its share
  int32_t num_unfinished = 0;
};

// Shreedhar and Varghese, "Efficient fair queueing using deficit round-robin", SIGCOMM '95, section 3.1; what a request
// costs is the tokens of its prompt when it starts, and each output token as it comes, so that a tenant pays for what
// it got rather than for what it asked for. A tenant with nothing unfinished is forgotten.
class FairOrder final : public QueueOrder {
 public:
  void add(Sequence& sequence) override;
  void remove(Sequence& sequence) override;
  Sequence* first(const SequenceQueue& arrivals) const override;
  void on_start(Sequence& sequence) override;
  void on_output(Sequence& sequence) override { --sequence.tenant->balance; }
  void on_end(Sequence& sequence) override;

 private:
  static constexpr int64_t kQuantum = 256;  // tokens that a round gives to every tenant that has requests waiting

  struct Turn {
    Tenant* tenant = nullptr;
    size_t index = 0;         // in ring_
    int64_t num_rounds = 0;   // until it can pay
  };
  Turn next_turn() const;

  std::unordered_map<std::string, std::unique_ptr<Tenant>> tenants_;
  std::vector<Tenant*> ring_;  // in order of first arrival
  size_t turn_ = 0;            // index of the tenant that is being served: it goes on while its balance lasts
};

}  // namespace steploop
