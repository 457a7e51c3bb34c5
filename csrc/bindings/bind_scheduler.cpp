// Python: the scheduler alone, for tests and studies. What it returns are copies.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "sched/scheduler.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace steploop {
namespace {

struct ScheduledSequenceCopy {
  SequenceId sequence_id;
  int32_t first_token, num_scheduled_tokens, num_sample_rows;
};

struct SchedulerOutputCopy {
  int64_t step_id;
  std::vector<ScheduledSequenceCopy> scheduled;
  std::vector<std::tuple<int32_t, BlockId, int32_t, BlockId>> transfers;
  std::vector<SequenceId> preempted, timed_out;
  int32_t num_scheduled_tokens, num_prompt_tokens, num_decode_tokens;
};

using EndedSequence = std::tuple<SequenceId, std::string, std::vector<TokenId>>;  // id, finish reason, output tokens

SchedulerOutputCopy schedule(Scheduler& scheduler, int64_t now_us) {
  const SchedulerOutput& output = scheduler.schedule(now_us);
  SchedulerOutputCopy copy;
  copy.step_id = output.step_id;
  copy.preempted = output.preempted;
  copy.num_scheduled_tokens = output.num_scheduled_tokens;
  copy.num_prompt_tokens = output.num_prompt_tokens;
  copy.num_decode_tokens = output.num_decode_tokens;
  for (const ScheduledSequence& scheduled : output.scheduled)
    copy.scheduled.push_back(
        {scheduled.sequence->id, scheduled.first_token, scheduled.num_scheduled_tokens, scheduled.num_sample_rows});
  for (const BlockTransfer& transfer : output.transfers)
    copy.transfers.emplace_back(transfer.src_pool, transfer.src_block, transfer.dst_pool, transfer.dst_block);
  for (const Sequence* sequence : output.timed_out) copy.timed_out.push_back(sequence->id);
  return copy;
}

std::vector<EndedSequence> update(Scheduler& scheduler, int64_t step_id,
                                  const std::vector<std::pair<SequenceId, std::optional<TokenId>>>& samples,
                                  int64_t now_us) {
  std::vector<SampledTokens> sampled;
  for (const auto& [sequence, token] : samples) {
    const std::span<const TokenId> tokens(token ? &*token : nullptr, token ? 1 : 0);
    sampled.push_back({sequence, tokens, static_cast<int32_t>(tokens.size()), !token});
  }
  std::vector<EndedSequence> ended;
  for (const Sequence* sequence : scheduler.update(step_id, sampled, now_us))
    ended.emplace_back(
        sequence->id, finish_reason_name(sequence->finish_reason),
        std::vector<TokenId>(sequence->tokens.begin() + sequence->num_prompt_tokens, sequence->tokens.end()));
  return ended;
}

// A step as arrays, for those who drive the scheduler from Python at speed.
py::tuple schedule_arrays(Scheduler& scheduler, int64_t now_us) {
  const SchedulerOutput& output = scheduler.schedule(now_us);
  const auto count = static_cast<py::ssize_t>(output.scheduled.size());
  py::array_t<SequenceId> ids(count);
  py::array_t<int32_t> spans({count, py::ssize_t{3}});
  SequenceId* id = ids.mutable_data();
  int32_t* span = spans.mutable_data();
  for (const ScheduledSequence& scheduled : output.scheduled) {
    *id++ = scheduled.sequence->id;
    *span++ = scheduled.first_token;
    *span++ = scheduled.num_scheduled_tokens;
    *span++ = scheduled.num_sample_rows;
  }
  return py::make_tuple(output.step_id, std::move(ids), std::move(spans));
}

// No conversion: a float that is no token shall not become one.
using IdArray = py::array_t<SequenceId, py::array::c_style>;
using TokenArray = py::array_t<TokenId, py::array::c_style>;

// The sequences with a sample row as the scheduler wants them: in the order of the step. They are those whose tokens
// the caller counted out, so that the step itself says which they are.
class ArrayUpdate {
 public:
  py::array_t<SequenceId> operator()(Scheduler& scheduler, int64_t step_id, const IdArray& ids,
                                     const TokenArray& tokens, int64_t now_us) {
    if (ids.ndim() != 1 || tokens.ndim() != 1 || ids.size() != tokens.size())
      throw InvalidArgumentError(
          concat("sequence_ids and token_ids must be arrays of one length, got ", ids.size(), " and ", tokens.size()));
    const SequenceId* id = ids.data();
    const TokenId* token = tokens.data();
    sampled_.resize(static_cast<size_t>(ids.size()), {0, {}, 1, false});
    for (SampledTokens& sample : sampled_) {
      sample.sequence = *id++;
      sample.tokens = std::span(token++, 1);
    }
    const auto ended = scheduler.update(step_id, sampled_, now_us);
    py::array_t<SequenceId> out(static_cast<py::ssize_t>(ended.size()));
    SequenceId* data = out.mutable_data();
    for (const Sequence* sequence : ended) *data++ = sequence->id;
    return out;
  }

 private:
  std::vector<SampledTokens> sampled_;  // kept between calls
};

const Sequence& sequence_of(const Scheduler& scheduler, SequenceId id) {
  const Sequence* sequence = scheduler.find(id);
  if (!sequence) throw py::key_error(concat("no sequence ", id));
  return *sequence;
}

py::dict sequence_info(const Scheduler& scheduler, SequenceId id) {
  const Sequence& sequence = sequence_of(scheduler, id);
  const auto or_none = [](int64_t value) { return value < 0 ? std::nullopt : std::optional(value); };
  py::dict info;
  info["state"] = sequence_state_name(sequence.state);
  info["in_flight"] = sequence.in_flight;
  info["num_prompt_tokens"] = sequence.num_prompt_tokens;
  info["num_output_tokens"] = sequence.num_output_tokens();
  info["num_computed_tokens"] = sequence.num_computed_tokens;
  info["num_prefix_hit_tokens"] = sequence.num_prefix_hit_tokens;
  info["num_preemptions"] = sequence.num_preemptions;
  info["num_bypasses"] = sequence.num_bypasses;
  info["max_tokens"] = sequence.stop.max_tokens;
  info["finish_reason"] = sequence.finish_reason == FinishReason::kNone
                              ? py::object(py::none())
                              : py::str(finish_reason_name(sequence.finish_reason));
  info["stop_token"] = or_none(sequence.stop_token);
  info["arrival_us"] = sequence.arrival_us;
  info["first_scheduled_us"] = or_none(sequence.first_scheduled_us);
  info["first_token_us"] = or_none(sequence.first_token_us);
  info["last_token_us"] = or_none(sequence.last_token_us);
  info["finished_us"] = or_none(sequence.finished_us);
  info["host_blocks"] = sequence.host_blocks;
  return info;
}

SchedulerConfig make_config(int32_t max_num_seqs, int32_t max_num_batched_tokens, int32_t max_model_len,
                            int32_t num_kv_blocks, int32_t block_size, int32_t num_host_blocks,
                            const std::string& scheduling_policy, double watermark, const std::string& preemption_mode,
                            double swap_block_us, const std::string& queue_order, int32_t max_bypass,
                            bool enable_chunked_prefill, int32_t long_prefill_token_threshold,
                            const std::string& prompt_sharing, double waiting_served_ratio, int32_t max_waiting_tokens,
                            int64_t target_step_duration_us, bool enable_prefix_caching, uint64_t prefix_hash_mask) {
  SchedulerConfig config;
  config.max_num_seqs = max_num_seqs;
  config.max_num_batched_tokens = max_num_batched_tokens;
  config.max_model_len = max_model_len;
  config.blocks = {num_kv_blocks, block_size, num_host_blocks, enable_prefix_caching, prefix_hash_mask};
  config.policy = policy_from_name(scheduling_policy.c_str());
  config.watermark = watermark;
  config.preemption = preemption_mode_from_name(preemption_mode.c_str());
  config.swap_block_us = swap_block_us;
  config.order = order_from_name(queue_order.c_str());
  config.max_bypass = max_bypass;
  config.enable_chunked_prefill = enable_chunked_prefill;
  config.long_prefill_token_threshold = long_prefill_token_threshold;
  config.prompt_sharing = prompt_sharing_from_name(prompt_sharing.c_str());
  config.waiting_served_ratio = waiting_served_ratio;
  config.max_waiting_tokens = max_waiting_tokens;
  config.target_step_duration_us = target_step_duration_us;
  validate(config);
  return config;
}

void add(Scheduler& scheduler, SequenceId id, std::vector<TokenId> token_ids, int32_t max_tokens, int32_t min_tokens,
         std::vector<TokenId> stop_token_ids, std::vector<TokenId> eos_token_ids, int64_t now_us, int32_t priority,
         std::string tenant, uint64_t cache_key, std::optional<int64_t> deadline_us) {
  StopCriteria stop{max_tokens, min_tokens, std::move(eos_token_ids), std::move(stop_token_ids)};
  SequenceOptions options{priority, std::move(tenant), cache_key, deadline_us.value_or(kNoDeadline)};
  scheduler.add(id, std::move(token_ids), std::move(stop), now_us, std::move(options));
}

void bind_output(py::module_& m) {
  py::class_<ScheduledSequenceCopy>(m, "ScheduledSequence", "One sequence's part of a step.")
      .def_readonly("sequence_id", &ScheduledSequenceCopy::sequence_id)
      .def_readonly("first_token", &ScheduledSequenceCopy::first_token)
      .def_readonly("num_scheduled_tokens", &ScheduledSequenceCopy::num_scheduled_tokens)
      .def_readonly("num_sample_rows", &ScheduledSequenceCopy::num_sample_rows);

  py::class_<SchedulerOutputCopy>(m, "SchedulerOutput", "What one step computes.")
      .def_readonly("step_id", &SchedulerOutputCopy::step_id)
      .def_readonly("scheduled", &SchedulerOutputCopy::scheduled, "Decodes, then prompts.")
      .def_readonly("transfers", &SchedulerOutputCopy::transfers,
                    "(source pool, source block, destination pool, destination block), to do in order before the step; "
                    "pool 0 is the device's, 1 the host's.")
      .def_readonly("preempted", &SchedulerOutputCopy::preempted)
      .def_readonly("timed_out", &SchedulerOutputCopy::timed_out, "Ended, as their deadlines had passed.")
      .def_readonly("num_scheduled_tokens", &SchedulerOutputCopy::num_scheduled_tokens)
      .def_readonly("num_prompt_tokens", &SchedulerOutputCopy::num_prompt_tokens)
      .def_readonly("num_decode_tokens", &SchedulerOutputCopy::num_decode_tokens);
}

}  // namespace

py::dict to_dict(const SchedulerStats& stats) {
  py::dict dict;
  dict["num_waiting"] = stats.num_waiting;
  dict["num_preempted"] = stats.num_preempted;
  dict["num_swapped"] = stats.num_swapped;
  dict["num_queued_requests"] = stats.num_queued_requests;
  dict["num_queued_tokens"] = stats.num_queued_tokens;
  dict["num_running"] = stats.num_running;
  dict["num_waiting_for_kv"] = stats.num_waiting_for_kv;
  dict["num_finished"] = stats.num_finished;
  dict["num_aborted"] = stats.num_aborted;
  dict["num_timeouts"] = stats.num_timeouts;
  dict["num_steps"] = stats.num_steps;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_swaps"] = stats.num_swaps;
  dict["num_recomputed_tokens"] = stats.num_recomputed_tokens;
  dict["num_swapped_out_tokens"] = stats.num_swapped_out_tokens;
  dict["num_swapped_in_tokens"] = stats.num_swapped_in_tokens;
  dict["num_forks"] = stats.num_forks;
  dict["num_bypasses"] = stats.num_bypasses;
  dict["num_prefix_queried_tokens"] = stats.num_prefix_queried_tokens;
  dict["num_prefix_hit_tokens"] = stats.num_prefix_hit_tokens;
  dict["num_empty_slots"] = stats.num_empty_slots;
  dict["num_kv_blocks"] = stats.num_kv_blocks;
  dict["num_free_kv_blocks"] = stats.num_free_kv_blocks;
  dict["num_cached_kv_blocks"] = stats.num_cached_kv_blocks;
  dict["num_used_kv_blocks"] = stats.num_used_kv_blocks;
  dict["num_kv_tokens"] = stats.num_kv_tokens;
  dict["num_host_blocks"] = stats.num_host_blocks;
  dict["num_used_host_blocks"] = stats.num_used_host_blocks;
  dict["token_budget"] = stats.token_budget;
  dict["output_ratio"] = stats.output_ratio;
  return dict;
}

void bind_scheduler(py::module_& m) {
  py::class_<SchedulerConfig>(m, "SchedulerConfig", "Settings of a scheduler, and of the KV blocks that it hands out.")
      .def(py::init(&make_config), py::kw_only(), "max_num_seqs"_a, "max_num_batched_tokens"_a, "max_model_len"_a,
           "num_kv_blocks"_a, "block_size"_a = 16, "num_host_blocks"_a = 0, "scheduling_policy"_a = "on_demand",
           "watermark"_a = 0.0, "preemption_mode"_a = "recompute", "swap_block_us"_a = 0.0, "queue_order"_a = "fcfs",
           "max_bypass"_a = 8, "enable_chunked_prefill"_a = true, "long_prefill_token_threshold"_a = 0,
           "prompt_sharing"_a = "in_order", "waiting_served_ratio"_a = 0.3, "max_waiting_tokens"_a = 20,
           "target_step_duration_us"_a = 0, "enable_prefix_caching"_a = true, "prefix_hash_mask"_a = ~uint64_t{0},
           "Named as in EngineConfig. prefix_hash_mask: a test aid that makes hashes collide. Raises "
           "InvalidArgumentError.");
  bind_output(m);
  py::class_<Scheduler>(m, "Scheduler", "Iteration-level scheduling alone, without a model. Not thread-safe.")
      .def(py::init<const SchedulerConfig&>(), "config"_a)
      .def("add", &add, "id"_a, "token_ids"_a, py::kw_only(), "max_tokens"_a, "min_tokens"_a = 0,
           "stop_token_ids"_a = std::vector<TokenId>(), "eos_token_ids"_a = std::vector<TokenId>(), "now_us"_a = 0,
           "priority"_a = 0, "tenant"_a = "", "cache_key"_a = 0, "deadline_us"_a = py::none(),
           "Queues a sequence; raises InvalidRequestError and its subclasses.")
      .def(
          "add_sample", [](Scheduler& scheduler, SequenceId id, SequenceId of) { scheduler.add_sample(id, of); },
          "id"_a, py::kw_only(), "of"_a,
          "Queues a further sample of the request added last, whose first sample is `of`.")
      .def("schedule", &schedule, "now_us"_a = 0, "Picks the next step.")
      .def("update", &update, "step_id"_a, "samples"_a, "now_us"_a = 0,
           "Applies (sequence_id, token) for each sample row in the step's order; None as token: its logits were not "
           "finite. Returns (id, finish_reason, output tokens) of the sequences that this ended.")
      .def("schedule_arrays", &schedule_arrays, "now_us"_a = 0,
           "As schedule: (step_id, sequence ids int64 [n], int32 [n, 3] of first token, number of tokens and number of "
           "sample rows).")
      .def(
          "update_arrays",
          [call = ArrayUpdate()](Scheduler& scheduler, int64_t step_id, const IdArray& sequence_ids,
                                 const TokenArray& token_ids, int64_t now_us) mutable {
            return call(scheduler, step_id, sequence_ids, token_ids, now_us);
          },
          "step_id"_a, "sequence_ids"_a, "token_ids"_a, "now_us"_a = 0,
          "As update, one sequence (int64) and token (int32) for each sample row in the step's order. Returns the ids of "
          "the sequences that this ended. Raises InvalidArgumentError, InternalError.")
      .def(
          "abort",
          [](Scheduler& scheduler, SequenceId id, int64_t now_us) { return scheduler.abort(id, now_us) != nullptr; },
          "id"_a, "now_us"_a = 0, "False if there is no such unfinished sequence.")
      .def("reset_prefix_cache", &Scheduler::reset_prefix_cache, "Forgets every cached prefix; between steps only.")
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def("stats", [](const Scheduler& scheduler) { return to_dict(scheduler.stats()); })
      .def("check_integrity", &Scheduler::check_integrity)
      .def(
          "state",
          [](const Scheduler& scheduler, SequenceId id) {
            return sequence_state_name(sequence_of(scheduler, id).state);
          },
          "id"_a, "KeyError once an ended sequence is forgotten, which the next schedule call does.")
      .def("sequence_info", &sequence_info, "id"_a)
      .def(
          "block_table",
          [](const Scheduler& scheduler, SequenceId id) { return sequence_of(scheduler, id).blocks.blocks; }, "id"_a)
      .def(
          "shuffle_free_blocks",
          [](Scheduler& scheduler, uint64_t seed) { scheduler.block_manager().pool().shuffle_free_list(seed); },
          "seed"_a);
}

}  // namespace steploop
