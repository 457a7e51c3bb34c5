// The queue orders, one class each; `fair` has its own file.
#include "sched/queue_order.h"

#include "core/check.h"
#include "sched/fair_order.h"
#include "sched/sequence_heap.h"

namespace steploop {
namespace {

// First come, first served.
class Fcfs final : public QueueOrder {
 public:
  Sequence* first(const SequenceQueue& arrivals) const override { return arrivals.front(); }
};

// An order by something that does not change while a sequence waits.
template <class Before>
class HeapOrder : public QueueOrder {
 public:
  void add(Sequence& sequence) override { heap_.push(sequence); }
  void remove(Sequence& sequence) override { heap_.remove(sequence); }
  Sequence* first(const SequenceQueue&) const override { return heap_.first(); }

 private:
  SequenceHeap<Before, &Sequence::heap_index> heap_;
};

// The lower options.priority first, then by arrival.
struct ByClass {
  bool operator()(const Sequence& a, const Sequence& b) const {
    if (a.priority_class != b.priority_class) return a.priority_class < b.priority_class;
    return a.arrival_number < b.arrival_number;
  }
};

class Priority final : public HeapOrder<ByClass> {
 public:
  bool has_classes() const override { return true; }
};

// The shortest prompt first, then by arrival.
struct ByPromptLength {
  bool operator()(const Sequence& a, const Sequence& b) const {
    if (a.num_prompt_tokens != b.num_prompt_tokens) return a.num_prompt_tokens < b.num_prompt_tokens;
    return a.arrival_number < b.arrival_number;
  }
};

using ShortestFirst = HeapOrder<ByPromptLength>;

// SGLang's longest prefix match: whoever finds most of its prompt in the cache, before that is evicted; then by arrival.
// What the cache holds changes with every step, so nothing is kept; only the kNumCompared longest-waiting are compared,
// and each costs one look-up per block found.
class LongestPrefix final : public QueueOrder {
 public:
  explicit LongestPrefix(const BlockManager& blocks) : blocks_(blocks) {}

  Sequence* first(const SequenceQueue& arrivals) const override {
    Sequence* best = arrivals.front();
    int32_t most = -1, num_compared = 0;
    for (Sequence* sequence = best; sequence; sequence = sequence->next_queued) {
      if (num_compared++ == kNumCompared) break;
      const auto all_but_last = std::span<const TokenId>(sequence->tokens).first(sequence->tokens.size() - 1);
      const int32_t num_blocks = blocks_.match_prefix(all_but_last, sequence->options.cache_key).num_blocks;
      if (num_blocks <= most) continue;
      most = num_blocks;
      best = sequence;
    }
    return best;
  }

 private:
  static constexpr int32_t kNumCompared = 64;
  const BlockManager& blocks_;
};

}  // namespace

std::unique_ptr<QueueOrder> make_queue_order(QueueOrderKind kind, const BlockManager& blocks) {
  switch (kind) {
    case QueueOrderKind::kPriority: return std::make_unique<Priority>();
    case QueueOrderKind::kShortestFirst: return std::make_unique<ShortestFirst>();
    case QueueOrderKind::kLongestPrefix: return std::make_unique<LongestPrefix>(blocks);
    case QueueOrderKind::kFair: return std::make_unique<FairOrder>();
    case QueueOrderKind::kFcfs: break;
  }
  return std::make_unique<Fcfs>();
}

}  // namespace steploop
