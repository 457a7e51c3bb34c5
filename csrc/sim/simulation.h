// The scheduler and block manager that serve, on a virtual clock: what they would do with a workload on some device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/function_ref.h"
#include "sched/scheduler.h"
#include "sim/cost_model.h"
#include "sim/latency_histogram.h"
#include "sim/timeline.h"
#include "sim/workload.h"

namespace steploop {

// Which replica gets a request, as it arrives.
enum class Routing : uint8_t {
  kRoundRobin,
  kLeastOutstanding,  // the one whose unfinished requests have the fewest tokens, prompts and max_tokens
  kPrefixAffine,      // the same, with what its prefix cache holds of the new prompt taken off
};

// "round_robin", "least_outstanding", "prefix_affine"; throws InvalidArgumentError that lists them.
Routing routing_from_name(const char* name);

struct SimulationOptions {
  int32_t num_replicas = 1;
  Routing routing = Routing::kLeastOutstanding;
  int32_t max_timeline_points = 2048;
  bool record_spans = false;
  bool record_schedule = false;
  // Instead of the cost model's, one after another: how long each step of the only replica takes. Empty: the model's.
  std::span<const int64_t> step_durations_us;
};

// Times are on the virtual clock, in us; -1: it did not come to that.
struct SimulatedRequest {
  int64_t scheduled_us = -1;
  int64_t first_token_us = -1;
  int64_t last_token_us = -1;
  int64_t longest_gap_us = -1;  // between two of its tokens; -1: it has one
  int32_t num_output_tokens = 0;
  int32_t num_preemptions = 0;
  int32_t num_cached_tokens = 0;  // of its prompt, found in the prefix cache when it first started
  int32_t replica = -1;
};

// From when a request had a place in the batch to when it left: at its end, or as it gave way.
struct BatchSpan {
  int64_t request = 0;
  int64_t began_us = 0;
  int64_t ended_us = 0;
};

// Every step: a row of each column for the step, and of the last three for each sequence in it.
struct SimulatedSchedule {
  std::vector<int64_t> began_us;
  std::vector<int64_t> duration_us;
  std::vector<int32_t> replica;
  std::vector<int32_t> num_preempted;
  std::vector<int32_t> num_used_blocks;  // once it has ended
  std::vector<int64_t> num_tokens, num_sample_rows, num_decode_keys, num_prompt_pairs;  // as in StepWork
  std::vector<int64_t> offsets{0};  // [num_steps + 1]
  std::vector<int64_t> requests;
  std::vector<int32_t> first_tokens;
  std::vector<int32_t> token_counts;
};

struct SimulationResult {
  std::vector<SimulatedRequest> requests;
  LatencyHistogram inter_token;   // between any two tokens of a request that follow each other
  std::vector<TimelinePoint> timeline;
  std::vector<SchedulerStats> replicas;  // at the end
  std::vector<int64_t> busy_us;          // of each replica
  int64_t ended_us = 0;                  // when the last step did
  std::vector<BatchSpan> spans;
  SimulatedSchedule schedule;
};

// Serves a workload to its end. A step takes what came up to its beginning; the next begins as it ends. The same
// arguments give the same result.
//
// `report` is told now and then how many requests have ended; what it throws ends the simulation.
//
// Throws InvalidArgumentError for options or a workload that cannot be, or fewer step durations than steps;
// InvalidRequestError or RequestTooLongError for a request that the scheduler refuses, with its number.
SimulationResult simulate(const SchedulerConfig& config, const CostModel& cost, const SimulatedWorkload& workload,
                          const SimulationOptions& options, FunctionRef<void(int64_t)> report);

}  // namespace steploop
