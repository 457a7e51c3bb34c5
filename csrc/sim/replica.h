// One engine of a simulation: a scheduler, and the step that it is in.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "sched/scheduler.h"
#include "sim/cost_model.h"
#include "sim/recorder.h"
#include "sim/workload.h"

namespace steploop {

class Replica {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // All of these outlive it. step_durations_us: see SimulationOptions.
  Replica(int32_t number, const SchedulerConfig& config, const CostModel& cost, const SimulatedWorkload& workload,
          std::span<const int64_t> step_durations_us, Recorder& recorder);

  // Throws InvalidRequestError and its subclasses.
  void add(size_t request, std::vector<TokenId> prompt, int64_t now_us);

  void begin_step(int64_t now_us);  // if there is anything to do, and no step is under way
  void end_step();
  int64_t step_end_us() const { return time_.ended_us; }  // kNever: none is under way

  int64_t num_outstanding_tokens() const { return num_outstanding_tokens_; }  // prompts and max_tokens
  int64_t num_finished() const { return num_finished_; }
  int64_t busy_us() const { return busy_us_; }
  const Scheduler& scheduler() const { return scheduler_; }

 private:
  int64_t duration_us(const SchedulerOutput& output);
  int64_t num_tokens_asked(size_t request) const {
    return int64_t{workload_.num_prompt_tokens[request]} + workload_.max_tokens[request];
  }

  const CostModel& cost_;
  const SimulatedWorkload& workload_;
  std::span<const int64_t> step_durations_us_;
  Recorder& recorder_;
  Scheduler scheduler_;
  StepTime time_;                            // of the step under way
  const SchedulerOutput* output_ = nullptr;  // the same
  std::vector<TokenId> tokens_;              // of its samples
  std::vector<SampledTokens> sampled_;
  size_t num_steps_ = 0;
  int64_t num_finished_ = 0;
  int64_t busy_us_ = 0;
  int64_t num_outstanding_tokens_ = 0;
};

}  // namespace steploop
