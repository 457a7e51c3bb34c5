// A record of every step as JSON that chrome://tracing and ui.perfetto.dev show: a lane per sequence, and counters.
// Format: "Trace Event Format", JSON array of events with times in microseconds.
#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <unordered_map>

#include "engine/request.h"
#include "sched/scheduler.h"

namespace steploop {

// Spans of a lane: "queued", "prompt" (each chunk), "decode" (consecutive steps in one), "preempted"; then an instant
// "end" with its reason. The file is written step by step; a failure to write ends the tracing and nothing else.
class Trace {
 public:
  // Throws InvalidArgumentError if the file cannot be opened; what it held is gone.
  explicit Trace(const std::string& path);
  ~Trace() { close(); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void add(SequenceId id, const std::string& name, int64_t arrival_us);
  // After the step, with the scheduler's counts then.
  void step(const Scheduler& scheduler, const SchedulerOutput& output, const SchedulerStats& stats,
            std::span<const StepOutput> outputs, int64_t began_us, int64_t ended_us);
  void close();  // ends all spans and the file, which is valid JSON only then; idempotent

  const std::string& error() const { return error_; }  // why tracing stopped; empty: it did not

 private:
  struct Lane {
    const char* open = nullptr;  // the span that goes on; null: none
    int64_t since_us = 0;
    std::string args;  // of that span
    // Of a decode span:
    int64_t until_us = 0;
    int64_t last_step_id = 0;
    int64_t num_tokens = 0;
  };

  void begin_span(Lane& lane, const char* name, int64_t now_us, std::string args);
  void end_span(SequenceId id, Lane& lane, int64_t now_us);
  void decode(SequenceId id, Lane& lane, const SchedulerOutput& output, int64_t began_us, int64_t ended_us);
  void event(const char* phase, const std::string& name, int64_t lane, int64_t at_us, const std::string& rest);
  void span(SequenceId id, const char* name, int64_t began_us, int64_t ended_us, const std::string& args);
  void counters(const SchedulerOutput& output, const SchedulerStats& stats, int64_t began_us, int64_t ended_us);
  void write();
  void stop(const char* what);

  const std::string path_;
  std::FILE* file_;
  std::string buffer_;  // events not yet in the file
  std::string error_;
  int64_t last_us_ = 0;  // the end of the last step
  std::unordered_map<SequenceId, Lane> lanes_;  // of sequences that have not ended
};

}  // namespace steploop
