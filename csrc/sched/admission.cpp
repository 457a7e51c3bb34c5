// The admission policies, one class each.
#include "sched/admission.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace steploop {

namespace {

// Blocks that a sequence does not hold yet, until it has num_tokens.
int64_t num_missing_blocks(const Sequence& sequence, int32_t num_tokens, const BlockManager& blocks) {
  return std::max(0, blocks.num_blocks_for(num_tokens) - sequence.blocks.num_blocks());
}

// Of `next`, beyond those that it starts with.
int64_t num_later_blocks(const Sequence& next, int32_t num_tokens, const BlockManager& blocks) {
  return blocks.num_blocks_for(num_tokens) - blocks.num_blocks_for(next.num_tokens());
}

// Orca (Yu et al., OSDI '22, section 4.2: a slot is reserved for max_tokens); TensorRT-LLM's GUARANTEED_NO_EVICT.
// Starts a sequence while the blocks of all to their longest possible end fit, so that nobody ever has to give way.
class Reserve : public AdmissionPolicy {
 public:
  using AdmissionPolicy::AdmissionPolicy;

  int64_t num_free_blocks_to_start(const Sequence& next, int32_t num_start_blocks, Batch batch) const override {
    int64_t num_blocks = num_start_blocks + num_later_blocks(next, next.max_num_computed_tokens(), blocks_);
    for (const Sequence* sequence : batch)
      num_blocks += num_missing_blocks(*sequence, sequence->max_num_computed_tokens(), blocks_);
    return num_blocks;
  }
};

// Request-level batching, the baseline: fills a batch, and lets nobody in until all of it has ended.
class Static final : public Reserve {
 public:
  using Reserve::Reserve;

  void begin_step(Batch batch) override { is_open_ = batch.empty(); }
  bool is_open() const override { return is_open_; }
  bool fills_batch_at_once() const override { return true; }

 private:
  bool is_open_ = false;
};

// vLLM V1; TensorRT-LLM's MAX_UTILIZATION. Blocks as needed; whoever comes last gives way. Beside others a newcomer
// must leave one block for each of them: these grow by one every block_size steps, and without that it would often give
// way within a few steps, its prompt computed for nothing.
class OnDemand final : public AdmissionPolicy {
 public:
  OnDemand(const BlockManager& blocks, int64_t num_spare_blocks)
      : AdmissionPolicy(blocks), num_spare_blocks_(num_spare_blocks) {}

  int64_t num_free_blocks_to_start(const Sequence&, int32_t num_start_blocks, Batch batch) const override {
    if (batch.empty()) return num_start_blocks;
    return num_start_blocks + static_cast<int64_t>(batch.size()) + num_spare_blocks_;
  }
  bool preempts() const override { return true; }

 private:
  int64_t num_spare_blocks_;  // the watermark
};

// SGLang (python/sglang/srt/managers/schedule_policy.py). Expects of each sequence a share of its max_tokens: at first
// kFirstRatio, less with every step that goes well, more once somebody had to give way. Those with the fewest outputs
// do, as they lose the least.
class Estimate final : public AdmissionPolicy {
 public:
  Estimate(const BlockManager& blocks, int64_t num_spare_blocks)
      : AdmissionPolicy(blocks), num_spare_blocks_(num_spare_blocks) {}

  void begin_step(Batch batch) override {
    if (!batch.empty()) ratio_ = std::max(kLeastRatio, ratio_ - kDecay);
  }

  int64_t num_free_blocks_to_start(const Sequence& next, int32_t num_start_blocks, Batch batch) const override {
    if (batch.empty()) return num_start_blocks;
    int64_t num_blocks = num_start_blocks + num_later_blocks(next, num_expected_tokens(next), blocks_);
    for (const Sequence* sequence : batch)
      num_blocks += num_missing_blocks(*sequence, num_expected_tokens(*sequence), blocks_);
    return num_blocks + num_spare_blocks_;
  }

  bool preempts() const override { return true; }

  size_t victim(Batch batch) const override {
    const auto gives_way_before = [](const Sequence* a, const Sequence* b) {
      if (a->priority_class != b->priority_class) return a->priority_class > b->priority_class;
      if (a->num_output_tokens() != b->num_output_tokens()) return a->num_output_tokens() < b->num_output_tokens();
      return a->arrival_number > b->arrival_number;
    };
    return static_cast<size_t>(std::min_element(batch.begin(), batch.end(), gives_way_before) - batch.begin());
  }

  // What those left have made so far, and kStepsAhead more each, as a share of what they may make.
  void on_preemption(Batch batch) override {
    int64_t num_outputs = 0, num_most = 0;
    for (const Sequence* sequence : batch) {
      num_outputs += sequence->num_output_tokens() + kStepsAhead;
      num_most += sequence->stop.max_tokens;
    }
    const double seen = num_most == 0 ? 0 : static_cast<double>(num_outputs) / static_cast<double>(num_most);
    ratio_ = std::min(1.0, std::max(ratio_ + kLeastRaise, seen));
  }

  double output_ratio() const override { return ratio_; }

 private:
  static constexpr double kFirstRatio = 0.7, kLeastRatio = 0.1;
  static constexpr double kDecay = (kFirstRatio - kLeastRatio) / 600;  // per step
  static constexpr double kLeastRaise = 0.02;
  static constexpr int32_t kStepsAhead = 20;

  int32_t num_expected_tokens(const Sequence& sequence) const {
    const double more = ratio_ * (sequence.stop.max_tokens - sequence.num_output_tokens());
    return std::min(sequence.max_num_computed_tokens(), sequence.num_tokens() + static_cast<int32_t>(std::ceil(more)));
  }

  int64_t num_spare_blocks_;
  double ratio_ = kFirstRatio;
};

}  // namespace

std::unique_ptr<AdmissionPolicy> make_admission_policy(const SchedulerConfig& config, const BlockManager& blocks) {
  const auto num_spare_blocks = static_cast<int64_t>(config.watermark * config.blocks.num_blocks);
  switch (config.policy) {
    case SchedulingPolicy::kReserve: return std::make_unique<Reserve>(blocks);
    case SchedulingPolicy::kStatic: return std::make_unique<Static>(blocks);
    case SchedulingPolicy::kEstimate: return std::make_unique<Estimate>(blocks, num_spare_blocks);
    case SchedulingPolicy::kOnDemand: break;
  }
  return std::make_unique<OnDemand>(blocks, num_spare_blocks);
}

}  // namespace steploop
