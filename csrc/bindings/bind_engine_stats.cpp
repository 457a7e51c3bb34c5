// Python: an engine's counters, its record of iterations and its profile, as dicts.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "engine/engine.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace steploop {

namespace {

double milliseconds(double us) { return us * 1e-3; }
double microseconds(int64_t ns) { return static_cast<double>(ns) * 1e-3; }

py::dict step_dict(const PhaseDurations& durations, int64_t num_prompt_tokens, int64_t num_decode_tokens) {
  return py::dict("schedule_us"_a = durations.schedule_us, "build_us"_a = durations.build_us,
                  "forward_us"_a = durations.forward_us, "sample_us"_a = durations.sample_us,
                  "update_us"_a = durations.update_us, "num_prompt_tokens"_a = num_prompt_tokens,
                  "num_decode_tokens"_a = num_decode_tokens);
}

py::dict iteration_dict(const IterationStats& stats, const SchedulerConfig& config) {
  py::dict dict;
  dict["iteration"] = stats.iteration;
  dict["timestamp"] = static_cast<double>(stats.began_us) * 1e-6;
  dict["iteration_latency_ms"] = milliseconds(static_cast<double>(stats.latency_us));
  dict["num_queued_requests"] = stats.num_queued_requests;
  dict["num_active_requests"] = stats.num_active_requests;
  dict["num_scheduled_requests"] = stats.num_scheduled_requests;
  dict["num_context_requests"] = stats.num_context_requests;
  dict["num_generation_requests"] = stats.num_generation_requests;
  dict["num_paused_requests"] = stats.num_paused_requests;
  dict["num_new_active_requests"] = stats.num_new_active_requests;
  dict["new_active_requests_queue_latency_ms"] = milliseconds(stats.new_active_requests_queue_latency_us);
  dict["num_completed_requests"] = stats.num_completed_requests;
  dict["num_context_tokens"] = stats.num_context_tokens;
  dict["num_generation_tokens"] = stats.num_generation_tokens;
  dict["max_num_active_requests"] = config.max_num_seqs;
  dict["max_num_blocks"] = stats.max_num_blocks;
  dict["free_num_blocks"] = stats.free_num_blocks;
  dict["used_num_blocks"] = stats.used_num_blocks;
  dict["cached_num_blocks"] = stats.cached_num_blocks;
  dict["tokens_per_block"] = config.blocks.block_size;
  dict["reused_num_blocks"] = stats.reused_tokens / config.blocks.block_size;
  dict["reused_tokens"] = stats.reused_tokens;
  dict["queried_tokens"] = stats.queried_tokens;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_recomputed_tokens"] = stats.num_recomputed_tokens;
  dict["num_swapped_out_tokens"] = stats.num_swapped_out_tokens;
  dict["num_swapped_in_tokens"] = stats.num_swapped_in_tokens;
  dict["num_bypasses"] = stats.num_bypasses;
  dict["num_empty_slots"] = stats.num_empty_slots;
  dict["schedule_us"] = stats.durations.schedule_us;
  dict["build_us"] = stats.durations.build_us;
  dict["forward_us"] = stats.durations.forward_us;
  dict["sample_us"] = stats.durations.sample_us;
  dict["update_us"] = stats.durations.update_us;
  return dict;
}

py::dict operation_dict(const ExecProfile& profile, size_t operation) {
  py::list working_us, waiting_us;
  for (const auto& operations : profile.threads) {
    const OperationTimes& times = operations[operation];
    working_us.append(microseconds(times.duration_ns - times.barriers.duration_ns));
    waiting_us.append(microseconds(times.barriers.duration_ns));
  }
  const OperationTimes& of_any = profile.threads.front()[operation];  // all threads make the same calls
  return py::dict("num_calls"_a = of_any.num_calls, "num_barriers"_a = of_any.barriers.count,
                  "working_us"_a = working_us, "waiting_us"_a = waiting_us);
}

}  // namespace

py::dict stats_of(const Engine& engine) {
  const EngineStats stats = engine.stats();
  py::dict last = step_dict(stats.last, stats.last_num_prompt_tokens, stats.last_num_decode_tokens);
  last["num_sequences"] = stats.last_num_sequences;
  py::dict dict = to_dict(stats.scheduler);
  dict["block_size"] = engine.config().scheduler.blocks.block_size;
  dict["num_iterations"] = stats.num_iterations;
  dict["last_step"] = last;
  dict["total"] = step_dict(stats.total, stats.total_num_prompt_tokens, stats.total_num_decode_tokens);
  dict["batch_invariant"] = engine.config().matmul == nullptr;
  dict["num_threads"] = engine.num_threads();
  dict["isa"] = engine.isa();
  py::dict linear_weights;
  for (const LinearWeights& weights : engine.linear_weights())
    linear_weights[weights.kind] = py::dict("format"_a = weights.format, "size_bytes"_a = weights.size_bytes);
  dict["linear_weights"] = linear_weights;
  dict["trace_error"] = stats.trace_error.empty() ? py::object(py::none()) : py::str(stats.trace_error);
  return dict;
}

py::list drain_iteration_stats(Engine& engine) {
  py::list list;
  for (const IterationStats& stats : engine.drain_iteration_stats())
    list.append(iteration_dict(stats, engine.config().scheduler));
  return list;
}

py::dict take_profile(Engine& engine) {
  ExecProfile profile;
  {
    const py::gil_scoped_release release;
    profile = engine.take_profile();
  }
  py::dict operations;
  for (size_t i = 0; i < kNumOperations; ++i) operations[kOperationNames[i]] = operation_dict(profile, i);
  return py::dict("num_runs"_a = profile.num_runs, "run_us"_a = microseconds(profile.run_ns),
                  "operations"_a = operations);
}

}  // namespace steploop
