// Trace: events as text, and the spans that are still open.
#include "engine/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/errors.h"

namespace steploop {

namespace {

constexpr const char* kQueued = "queued";
constexpr const char* kDecode = "decode";
constexpr const char* kPreempted = "preempted";

constexpr int64_t kCounterLane = 0;

int64_t lane_of(SequenceId id) { return id + 1; }

// A JSON string. Bytes from 0x80 on are UTF-8 and stay as they are.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

Trace::Trace(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "w")) {
  if (!file_) throw InvalidArgumentError(concat("trace file ", path, " cannot be opened: ", std::strerror(errno)));
  buffer_ = "[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"args\":{\"name\":\"steploop\"}}";
  write();
}

void Trace::add(SequenceId id, const std::string& name, int64_t arrival_us) {
  if (!file_) return;
  event("M", "thread_name", lane_of(id), 0, concat("\"args\":{\"name\":", quoted(name), "}"));
  begin_span(lanes_[id], kQueued, arrival_us, "");
}

void Trace::step(const Scheduler& scheduler, const SchedulerOutput& output, const SchedulerStats& stats,
                 std::span<const StepOutput> outputs, int64_t began_us, int64_t ended_us) {
  if (!file_) return;
  for (const SequenceId id : output.preempted) {
    Lane& lane = lanes_.at(id);
    end_span(id, lane, began_us);
    const bool swapped = scheduler.find(id)->is_swapped_out();
    begin_span(lane, kPreempted, began_us, swapped ? "\"mode\":\"swap\"" : "\"mode\":\"recompute\"");
  }
  for (const ScheduledSequence& scheduled : output.scheduled) {
    const SequenceId id = scheduled.sequence->id;
    Lane& lane = lanes_.at(id);
    if (scheduled.is_decode()) {
      decode(id, lane, output, began_us, ended_us);
    } else {
      end_span(id, lane, began_us);
      span(id, "prompt", began_us, ended_us,
           concat("\"first_token\":", scheduled.first_token, ",\"num_tokens\":", scheduled.num_scheduled_tokens));
    }
  }
  for (const StepOutput& ended : outputs) {
    if (ended.finish_reason == FinishReason::kNone) continue;
    const SequenceId id = ended.request->samples.first + ended.index;
    end_span(id, lanes_.at(id), ended_us);
    lanes_.erase(id);
    event("i", "end", lane_of(id), ended_us,
          concat("\"s\":\"t\",\"args\":{\"reason\":\"", finish_reason_name(ended.finish_reason), "\"}"));
  }
  counters(output, stats, began_us, ended_us);
  last_us_ = ended_us;
  write();
}

void Trace::close() {
  if (!file_) return;
  for (auto& [id, lane] : lanes_) end_span(id, lane, last_us_);
  lanes_.clear();
  buffer_ += "\n]\n";
  write();
  if (file_ && std::fclose(std::exchange(file_, nullptr)) != 0) stop("closing");
}

// A decode step goes on with the span of the step before it, if there is one.
void Trace::decode(SequenceId id, Lane& lane, const SchedulerOutput& output, int64_t began_us, int64_t ended_us) {
  if (lane.open != kDecode || lane.last_step_id + 1 != output.step_id) {
    end_span(id, lane, began_us);
    begin_span(lane, kDecode, began_us, "");
  }
  ++lane.num_tokens;
  lane.until_us = ended_us;
  lane.last_step_id = output.step_id;
}

void Trace::begin_span(Lane& lane, const char* name, int64_t now_us, std::string args) {
  lane = {.open = name, .since_us = now_us, .args = std::move(args)};
}

void Trace::end_span(SequenceId id, Lane& lane, int64_t now_us) {
  if (lane.open == kDecode)
    span(id, kDecode, lane.since_us, lane.until_us, concat("\"num_tokens\":", lane.num_tokens));
  else if (lane.open)
    span(id, lane.open, lane.since_us, now_us, lane.args);
  lane.open = nullptr;
}

void Trace::event(const char* phase, const std::string& name, int64_t lane, int64_t at_us, const std::string& rest) {
  buffer_ += concat(",\n{\"ph\":\"", phase, "\",\"name\":\"", name, "\",\"pid\":1,\"tid\":", lane, ",\"ts\":", at_us,
                    ",", rest, "}");
}

void Trace::span(SequenceId id, const char* name, int64_t began_us, int64_t ended_us, const std::string& args) {
  // An arrival time given by the caller may lie ahead.
  const int64_t duration_us = std::max<int64_t>(0, ended_us - began_us);
  event("X", name, lane_of(id), began_us, concat("\"dur\":", duration_us, ",\"args\":{", args, "}"));
}

void Trace::counters(const SchedulerOutput& output, const SchedulerStats& stats, int64_t began_us, int64_t ended_us) {
  const auto count = [this](const char* name, int64_t at_us, const std::string& args) {
    event("C", name, kCounterLane, at_us, concat("\"args\":{", args, "}"));
  };
  count("tokens", began_us, concat("\"prompt\":", output.num_prompt_tokens, ",\"decode\":", output.num_decode_tokens));
  count("requests", ended_us, concat("\"running\":", stats.num_running, ",\"waiting\":", stats.num_waiting));
  count("KV blocks", ended_us,
        concat("\"used\":", stats.num_used_kv_blocks, ",\"cached\":", stats.num_cached_kv_blocks));
}

void Trace::write() {
  const bool written = std::fwrite(buffer_.data(), 1, buffer_.size(), file_) == buffer_.size();
  if (!written || std::fflush(file_) != 0) stop("writing");
  buffer_.clear();
}

void Trace::stop(const char* what) {
  error_ = concat(what, " trace file ", path_, " failed: ", std::strerror(errno));
  if (file_) std::fclose(file_);
  file_ = nullptr;
  lanes_.clear();
}

}  // namespace steploop
