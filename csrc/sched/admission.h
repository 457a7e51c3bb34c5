// Admission policies: which sequence may start, and who gives way when blocks run out. This is all that they differ in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sched/scheduler_config.h"
#include "sched/sequence.h"

namespace steploop {

// What a policy sees of the scheduler.
struct BatchView {
  const std::vector<Sequence*>& running;  // by priority class, then arrival
  const BlockManager& blocks;
};

class AdmissionPolicy {
 public:
  virtual ~AdmissionPolicy() = default;

  virtual void begin_step(const BatchView&) {}

  // Whether `next`, the first of the queue, may start beside those that run. num_start_blocks: free blocks that it
  // takes for the tokens it has. With nothing running every policy admits, or the request would never start.
  virtual bool admits(const Sequence& next, int32_t num_start_blocks, const BatchView& batch) const = 0;

  // Whether members wait in the batch for tokens of a step: a batch is filled at once, whatever the step's budget.
  virtual bool fills_batch_at_once() const { return false; }

  // Whether running sequences may lose their blocks. If not, admits() keeps enough free for all to end.
  virtual bool preempts() const { return false; }

  // Index in batch.running of the one to lose its blocks. Only if preempts().
  virtual size_t victim(const BatchView& batch) const;

  virtual void on_preemption(const BatchView&) {}  // after the victim has left

  virtual double output_ratio() const { return 1; }  // the share of max_tokens that it expects of a sequence
};

std::unique_ptr<AdmissionPolicy> make_admission_policy(const SchedulerConfig& config);

}  // namespace steploop
