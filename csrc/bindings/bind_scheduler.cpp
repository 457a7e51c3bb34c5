// Python: the scheduler and the block manager alone, for tests and studies. What they return are copies.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "kv/prefix_hash.h"
#include "sched/scheduler.h"

namespace py = pybind11;

namespace steploop {
namespace {

struct ScheduledSequenceCopy {
  SequenceId sequence_id;
  int32_t first_token, num_scheduled_tokens, num_sample_rows;
};

struct SchedulerOutputCopy {
  int64_t step_id;
  std::vector<ScheduledSequenceCopy> scheduled;
  std::vector<SequenceId> preempted;
  int32_t num_scheduled_tokens, num_prompt_tokens, num_decode_tokens;
};

using EndedSequence = std::tuple<SequenceId, std::string, std::vector<TokenId>>;  // id, finish reason, output tokens

SchedulerOutputCopy schedule(Scheduler& scheduler, int64_t now_us) {
  const SchedulerOutput& output = scheduler.schedule(now_us);
  SchedulerOutputCopy copy{output.step_id,           {},
                           output.preempted,         output.num_scheduled_tokens,
                           output.num_prompt_tokens, output.num_decode_tokens};
  for (const ScheduledSequence& scheduled : output.scheduled)
    copy.scheduled.push_back(
        {scheduled.sequence->id, scheduled.first_token, scheduled.num_scheduled_tokens, scheduled.num_sample_rows});
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
  info["num_hashed_blocks"] = sequence.blocks.num_hashed_blocks;
  info["num_preemptions"] = sequence.num_preemptions;
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
  return info;
}

py::dict stats_dict(const Scheduler& scheduler) {
  const SchedulerStats stats = scheduler.stats();
  py::dict dict;
  dict["num_waiting"] = stats.num_waiting;
  dict["num_preempted"] = stats.num_preempted;
  dict["num_running"] = stats.num_running;
  dict["num_finished"] = stats.num_finished;
  dict["num_aborted"] = stats.num_aborted;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_recomputed_tokens"] = stats.num_recomputed_tokens;
  dict["num_kv_blocks"] = stats.num_kv_blocks;
  dict["num_used_kv_blocks"] = stats.num_used_kv_blocks;
  dict["num_kv_tokens"] = stats.num_kv_tokens;
  dict["num_steps"] = stats.num_steps;
  return dict;
}

void bind_scheduler_class(py::module_& m) {
  py::class_<ScheduledSequenceCopy>(m, "ScheduledSequence", "One sequence's part of a step.")
      .def_readonly("sequence_id", &ScheduledSequenceCopy::sequence_id)
      .def_readonly("first_token", &ScheduledSequenceCopy::first_token)
      .def_readonly("num_scheduled_tokens", &ScheduledSequenceCopy::num_scheduled_tokens)
      .def_readonly("num_sample_rows", &ScheduledSequenceCopy::num_sample_rows);

  py::class_<SchedulerOutputCopy>(m, "SchedulerOutput", "What one step computes.")
      .def_readonly("step_id", &SchedulerOutputCopy::step_id)
      .def_readonly("scheduled", &SchedulerOutputCopy::scheduled)
      .def_readonly("preempted", &SchedulerOutputCopy::preempted)
      .def_readonly("num_scheduled_tokens", &SchedulerOutputCopy::num_scheduled_tokens)
      .def_readonly("num_prompt_tokens", &SchedulerOutputCopy::num_prompt_tokens)
      .def_readonly("num_decode_tokens", &SchedulerOutputCopy::num_decode_tokens);

  py::class_<Scheduler>(m, "Scheduler", "Iteration-level scheduling alone, without a model. Not thread-safe.")
      .def(py::init([](int32_t max_num_seqs, int32_t max_num_batched_tokens, int32_t max_model_len,
                       int32_t num_kv_blocks, int32_t block_size, const std::string& policy) {
             const SchedulerConfig config{.max_num_seqs = max_num_seqs,
                                          .max_num_batched_tokens = max_num_batched_tokens,
                                          .max_model_len = max_model_len,
                                          .policy = scheduling_policy_from_name(policy.c_str())};
             return std::make_unique<Scheduler>(config, num_kv_blocks, block_size);
           }),
           py::kw_only(), py::arg("max_num_seqs"), py::arg("max_num_batched_tokens"), py::arg("max_model_len"),
           py::arg("num_kv_blocks"), py::arg("block_size") = 16, py::arg("policy") = "on_demand")
      .def(
          "add",
          [](Scheduler& scheduler, SequenceId id, std::vector<TokenId> token_ids, int32_t max_tokens,
             int32_t min_tokens, std::vector<TokenId> stop_token_ids, std::vector<TokenId> eos_token_ids,
             int64_t now_us) {
            scheduler.add(id, std::move(token_ids),
                          {.max_tokens = max_tokens,
                           .min_tokens = min_tokens,
                           .eos_token_ids = std::move(eos_token_ids),
                           .stop_token_ids = std::move(stop_token_ids)},
                          now_us);
          },
          py::arg("id"), py::arg("token_ids"), py::kw_only(), py::arg("max_tokens"), py::arg("min_tokens") = 0,
          py::arg("stop_token_ids") = std::vector<TokenId>(), py::arg("eos_token_ids") = std::vector<TokenId>(),
          py::arg("now_us") = 0, "Queues a sequence; raises InvalidRequestError and its subclasses.")
      .def("schedule", &schedule, py::arg("now_us") = 0, "Picks the next step.")
      .def("update", &update, py::arg("step_id"), py::arg("samples"), py::arg("now_us") = 0,
           "Applies (sequence_id, token) for each sample row in the step's order; None as token: its logits were not "
           "finite. Returns (id, finish_reason, output tokens) of the sequences that this ended.")
      .def(
          "abort",
          [](Scheduler& scheduler, SequenceId id, int64_t now_us) { return scheduler.abort(id, now_us) != nullptr; },
          py::arg("id"), py::arg("now_us") = 0, "False if there is no such unfinished sequence.")
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def("stats", &stats_dict)
      .def("check_integrity", &Scheduler::check_integrity)
      .def(
          "state",
          [](const Scheduler& scheduler, SequenceId id) {
            return sequence_state_name(sequence_of(scheduler, id).state);
          },
          py::arg("id"), "KeyError once an ended sequence is forgotten, which the next schedule call does.")
      .def("sequence_info", &sequence_info, py::arg("id"))
      .def(
          "block_table",
          [](const Scheduler& scheduler, SequenceId id) { return sequence_of(scheduler, id).blocks.blocks; },
          py::arg("id"))
      .def(
          "shuffle_free_blocks",
          [](Scheduler& scheduler, uint64_t seed) { scheduler.block_manager().pool().shuffle_free_list(seed); },
          py::arg("seed"));
}

void bind_block_manager_class(py::module_& m) {
  py::class_<BlockTable>(m, "BlockTable", "One sequence's KV blocks in order of position.")
      .def(py::init<>())
      .def_readonly("blocks", &BlockTable::blocks)
      .def_readonly("num_hashed_blocks", &BlockTable::num_hashed_blocks);

  py::class_<BlockManager>(m, "BlockManager", "Block tables over a pool of KV blocks.")
      .def(py::init<int32_t, int32_t>(), py::kw_only(), py::arg("num_blocks"), py::arg("block_size") = 16)
      .def_property_readonly("block_size", &BlockManager::block_size)
      .def_property_readonly("num_blocks", [](const BlockManager& manager) { return manager.pool().num_blocks(); })
      .def_property_readonly("num_free_blocks", [](const BlockManager& manager) { return manager.pool().num_free(); })
      .def("num_blocks_for", &BlockManager::num_blocks_for, py::arg("num_tokens"))
      .def("grow", &BlockManager::grow, py::arg("table"), py::arg("num_tokens"))
      .def("trim", &BlockManager::trim, py::arg("table"), py::arg("num_tokens"))
      .def("free", &BlockManager::free, py::arg("table"))
      .def(
          "hash_full_blocks",
          [](BlockManager& manager, BlockTable& table, const std::vector<TokenId>& token_ids, uint64_t extra_key) {
            manager.hash_full_blocks(table, token_ids, extra_key);
          },
          py::arg("table"), py::arg("token_ids"), py::kw_only(), py::arg("extra_key") = 0)
      .def(
          "block_hash",
          [](const BlockManager& manager, const BlockTable& table, size_t index) {
            return manager.pool().hash(table.blocks.at(index));
          },
          py::arg("table"), py::arg("index"))
      .def(
          "shuffle_free_blocks", [](BlockManager& manager, uint64_t seed) { manager.pool().shuffle_free_list(seed); },
          py::arg("seed"))
      .def(
          "check_integrity",
          [](const BlockManager& manager, const std::vector<const BlockTable*>& tables) {
            for (const BlockTable* table : tables)
              if (!table) throw InvalidArgumentError("tables must be BlockTables, got None");
            manager.check_integrity(tables);
          },
          py::arg("tables"));
}

}  // namespace

void bind_scheduler(py::module_& m) {
  bind_scheduler_class(m);
  bind_block_manager_class(m);
  m.def(
      "hash_block",
      [](BlockHash parent, const std::vector<TokenId>& token_ids, uint64_t extra_key) {
        return hash_block(parent, token_ids, extra_key);
      },
      py::arg("parent"), py::arg("token_ids"), py::kw_only(), py::arg("extra_key") = 0,
      "The chained hash of a full KV block; 0 is the parent of a first block and never a result.");
}

}  // namespace steploop
