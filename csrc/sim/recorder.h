// Writes down what happens in a simulation.
#pragma once

#include <cstdint>
#include <vector>

#include "sched/scheduler.h"
#include "sim/simulation.h"
#include "sim/timeline.h"

namespace steploop {

// One step of one replica.
struct StepTime {
  int32_t replica = 0;
  int64_t began_us = 0;
  int64_t ended_us = 0;
  int32_t num_used_blocks = 0;  // while it runs, those of sequences that it ends among them
  int32_t num_unfinished = 0;   // the same of sequences

  int64_t duration_us() const { return ended_us - began_us; }
};

class Recorder {
 public:
  Recorder(size_t num_requests, const SimulationOptions& options, SimulationResult& result);

  void begin_step(const SchedulerOutput& output, const StepTime& time);
  void sample(const Sequence& sequence, int64_t now_us);  // it gets a token
  void finish(const Sequence& sequence);
  void end_step(const Scheduler& scheduler, const SchedulerOutput& output, const StepTime& time);
  void end();  // of the simulation: what was held back goes into the result

 private:
  void end_span(int64_t request, int64_t now_us);
  void flush_gaps();

  const SimulationOptions& options_;
  SimulationResult& result_;
  Timeline timeline_;
  std::vector<int64_t> span_began_us_;  // by request; -1: not in the batch. Empty: not recorded
  int64_t gap_us_ = 0, num_gaps_ = 0;   // gaps of one length, not yet in the histogram: a step's are mostly alike
};

}  // namespace steploop
