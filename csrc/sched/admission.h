// Admission policies: which sequence may start, and who gives way when blocks run out. This is all that they differ in.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "sched/scheduler_config.h"
#include "sched/sequence.h"

namespace steploop {

using Batch = std::span<Sequence* const>;  // running sequences, by priority class, then arrival

class AdmissionPolicy {
 public:
  explicit AdmissionPolicy(const BlockManager& blocks) : blocks_(blocks) {}
  virtual ~AdmissionPolicy() = default;

  virtual void begin_step(Batch) {}

  // How many blocks must be free for `next` to start beside `batch`; of those it takes num_start_blocks at once, for
  // the tokens it has. Beside nobody no policy asks for more than the pool has, or the request would never start.
  virtual int64_t num_free_blocks_to_start(const Sequence& next, int32_t num_start_blocks, Batch batch) const = 0;

  // Whether anybody may start in this step.
  virtual bool is_open() const { return true; }

  // Whether members wait in the batch for tokens of a step: a batch is filled at once, whatever the step's budget.
  virtual bool fills_batch_at_once() const { return false; }

  // Whether running sequences may lose their blocks. If not, enough stay free for all to end.
  virtual bool preempts() const { return false; }

  // Index in `batch` of the one to lose its blocks. Only if preempts().
  virtual size_t victim(Batch batch) const { return batch.size() - 1; }

  virtual void on_preemption(Batch) {}  // after the victim has left

  virtual double output_ratio() const { return 1; }  // the share of max_tokens that it expects of a sequence

 protected:
  const BlockManager& blocks_;
};

std::unique_ptr<AdmissionPolicy> make_admission_policy(const SchedulerConfig& config, const BlockManager& blocks);

}  // namespace steploop
