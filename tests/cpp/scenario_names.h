// What scenarios call settings, counters and errors.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "scenario_file.h"
#include "sched/scheduler.h"

namespace scenarios {

using namespace steploop;

struct Step {
  const SchedulerStats& stats;
  const SchedulerOutput& output;
};

inline const std::map<std::string, std::function<int64_t(const Step&)>> kCounters = {
    {"prompt_tokens", [](const Step& step) { return step.output.num_prompt_tokens; }},
    {"decode_tokens", [](const Step& step) { return step.output.num_decode_tokens; }},
    {"decodes", [](const Step& step) { return step.output.num_decode_sequences; }},
    {"waiting", [](const Step& step) { return step.stats.num_waiting; }},
    {"paused", [](const Step& step) { return step.stats.num_preempted; }},
    {"swapped", [](const Step& step) { return step.stats.num_swapped; }},
    {"queued", [](const Step& step) { return step.stats.num_queued_requests; }},
    {"queued_tokens", [](const Step& step) { return step.stats.num_queued_tokens; }},
    {"running", [](const Step& step) { return step.stats.num_running; }},
    {"waiting_for_kv", [](const Step& step) { return step.stats.num_waiting_for_kv; }},
    {"finished", [](const Step& step) { return step.stats.num_finished; }},
    {"aborted", [](const Step& step) { return step.stats.num_aborted; }},
    {"timeouts", [](const Step& step) { return step.stats.num_timeouts; }},
    {"steps", [](const Step& step) { return step.stats.num_steps; }},
    {"preemptions", [](const Step& step) { return step.stats.num_preemptions; }},
    {"swaps", [](const Step& step) { return step.stats.num_swaps; }},
    {"recomputed", [](const Step& step) { return step.stats.num_recomputed_tokens; }},
    {"swapped_out", [](const Step& step) { return step.stats.num_swapped_out_tokens; }},
    {"swapped_in", [](const Step& step) { return step.stats.num_swapped_in_tokens; }},
    {"forks", [](const Step& step) { return step.stats.num_forks; }},
    {"bypasses", [](const Step& step) { return step.stats.num_bypasses; }},
    {"queried", [](const Step& step) { return step.stats.num_prefix_queried_tokens; }},
    {"hits", [](const Step& step) { return step.stats.num_prefix_hit_tokens; }},
    {"empty_slots", [](const Step& step) { return step.stats.num_empty_slots; }},
    {"free", [](const Step& step) { return step.stats.num_free_kv_blocks; }},
    {"cached", [](const Step& step) { return step.stats.num_cached_kv_blocks; }},
    {"used", [](const Step& step) { return step.stats.num_used_kv_blocks; }},
    {"kv_tokens", [](const Step& step) { return step.stats.num_kv_tokens; }},
    {"host_used", [](const Step& step) { return step.stats.num_used_host_blocks; }},
    {"budget", [](const Step& step) { return step.stats.token_budget; }},
    {"ratio*1000", [](const Step& step) { return static_cast<int64_t>(step.stats.output_ratio * 1000 + 0.5); }},
};

inline SchedulerConfig read_config(Options options) {
  SchedulerConfig config;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 64;
  config.max_model_len = 128;
  config.blocks.num_blocks = 16;
  config.blocks.block_size = 8;
  options.read("max_num_seqs", config.max_num_seqs);
  options.read("max_num_batched_tokens", config.max_num_batched_tokens);
  options.read("max_model_len", config.max_model_len);
  options.read("num_blocks", config.blocks.num_blocks);
  options.read("block_size", config.blocks.block_size);
  options.read("num_host_blocks", config.blocks.num_host_blocks);
  options.read("enable_prefix_caching", config.blocks.enable_prefix_caching);
  options.read("prefix_hash_mask", config.blocks.prefix_hash_mask);
  config.policy = policy_from_name(options.text("policy", "on_demand").c_str());
  options.read("watermark", config.watermark);
  config.preemption = preemption_mode_from_name(options.text("preemption", "recompute").c_str());
  options.read("swap_block_us", config.swap_block_us);
  config.order = order_from_name(options.text("order", "fcfs").c_str());
  options.read("max_bypass", config.max_bypass);
  options.read("enable_chunked_prefill", config.enable_chunked_prefill);
  options.read("long_prefill_token_threshold", config.long_prefill_token_threshold);
  config.prompt_sharing = prompt_sharing_from_name(options.text("prompt_sharing", "in_order").c_str());
  options.read("waiting_served_ratio", config.waiting_served_ratio);
  options.read("max_waiting_tokens", config.max_waiting_tokens);
  options.read("target_step_duration_us", config.target_step_duration_us);
  options.done();
  return config;
}

inline std::string error_name(const Error& error) {
  if (dynamic_cast<const RequestTooLongError*>(&error)) return "RequestTooLongError";
  if (dynamic_cast<const DuplicateRequestError*>(&error)) return "DuplicateRequestError";
  if (dynamic_cast<const InvalidRequestError*>(&error)) return "InvalidRequestError";
  if (dynamic_cast<const InvalidArgumentError*>(&error)) return "InvalidArgumentError";
  if (dynamic_cast<const InternalError*>(&error)) return "InternalError";
  return "Error";
}

}  // namespace scenarios
