// The engine: requests in, one step at a time, tokens out.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/function_ref.h"
#include "engine/iteration_stats.h"
#include "engine/request.h"
#include "engine/trace.h"
#include "exec/exec.h"
#include "exec/profiled_exec.h"
#include "model/model.h"
#include "sched/scheduler.h"

namespace steploop {

struct EngineConfig {
  SchedulerConfig scheduler{.blocks = {.enable_prefix_caching = true}};  // the engine measures swap_block_us
  DType kv_dtype = DType::kFloat32;
  int32_t num_threads = 0;          // 0: default_num_threads()
  MatmulFunction matmul = nullptr;  // CUDA: gives up batch invariance for another library's speed
  uint64_t seed = 0;
  std::vector<TokenId> eos_token_ids;
  int32_t max_num_queued_requests = 0;      // never started; 0: no limit
  int64_t max_num_queued_tokens = 0;        // of their prompts; 0: no limit
  int32_t iteration_stats_capacity = 1024;  // iterations that are remembered until drained; 0: none
  std::string trace_path;                   // of the file to write a trace to; empty: none
  bool profile = false;                     // whether operations are measured, for take_profile; CPU only
};

struct EngineStats {
  SchedulerStats scheduler;  // as of the last step; what was added since counts as waiting and queued
  int32_t last_num_sequences = 0;
  int32_t last_num_prompt_tokens = 0;
  int32_t last_num_decode_tokens = 0;
  PhaseDurations last;
  int64_t num_iterations = 0;  // steps that had something to do or to report
  int64_t total_num_prompt_tokens = 0;
  int64_t total_num_decode_tokens = 0;
  PhaseDurations total;
  std::string trace_error;  // why tracing stopped; empty: it did not
};

class Engine {
 public:
  // Throws InvalidArgumentError for limits that contradict each other, a pool below one sequence of max_model_len, or a
  // trace file that cannot be opened.
  Engine(std::shared_ptr<const Model> model, const EngineConfig& config);
  ~Engine();

  // Device memory that an engine takes beside the weights and the KV cache: activations and the exec's own. 0 on the
  // CPU, where memory counts once it is used.
  // Throws UnsupportedDeviceError and UnsupportedModelError for what the device cannot run, InvalidArgumentError.
  static int64_t activation_bytes(const ModelConfig& model, DType dtype, Device device, const EngineConfig& config);

  // Any thread, also while step() runs: the next step takes the request in.
  // Throws InvalidRequestError, RequestTooLongError, DuplicateRequestError, QueueFullError, EngineDeadError.
  void add_request(std::string request_id, std::vector<TokenId> prompt, const SamplingParams& params,
                   RequestOptions options = {});

  // Any thread. False if there is no such request in flight. The next step reports each sample that still went on as
  // ended. index: only this sample. Throws InvalidArgumentError for an index that the request has not.
  bool abort_request(const std::string& request_id, std::optional<int32_t> index = {});

  // Any thread. While it does not accept, add_request throws QueueFullError.
  void set_accepting(bool accepting);

  // One iteration; hands what it did to `consume`, the outputs being valid only during that call. One step at a time: a
  // second caller waits. A failure inside marks the engine dead: this throws EngineDeadError now and ever after.
  void step(FunctionRef<void(std::span<const StepOutput>)> consume);

  bool has_unfinished_requests() const { return num_unfinished_requests() > 0; }
  int32_t num_unfinished_requests() const;  // accepted and not yet reported as ended
  EngineStats stats() const;
  std::vector<IterationStats> drain_iteration_stats();  // those since the last call, oldest first
  // Since the last call; waits for a step in progress. Throws InvalidArgumentError without `profile` in the
  // configuration, EngineDeadError.
  ExecProfile take_profile();
  void reset_prefix_cache();  // waits for a step in progress; throws EngineDeadError
  void close();  // waits for a step in progress; frees all memory; idempotent
  bool closed() const;

  const EngineConfig& config() const { return config_; }
  const ModelConfig& model_config() const { return model_config_; }
  int num_threads() const { return num_threads_; }
  const std::string& isa() const { return isa_; }
  const std::vector<LinearWeights>& linear_weights() const { return linear_weights_; }
  void* cuda_stream() const { return cuda_stream_; }  // a cudaStream_t on which steps run; null on the CPU

  // Logits after each token of one sequence, [tokens, vocab_size], through the same kernels, cache and chunks as a
  // request: for perplexity and comparisons. Needs an idle engine: throws InvalidRequestError while requests are in
  // flight, for ids out of range and for more tokens than max_model_len.
  std::vector<float> teacher_forced_logits(std::span<const TokenId> tokens);

  // Test aids; they wait for a step in progress.
  void check_integrity() const;
  void shuffle_free_blocks(uint64_t seed);
  std::vector<float> last_logits() const;  // [sample rows of the last step, vocab_size]

 private:
  // What needs the model's memory; gone after close().
  struct Runner;

  // Requests on their way to the scheduler.
  struct QueueSize {
    int32_t num_requests = 0;
    int32_t num_samples = 0;
    int64_t num_tokens = 0;  // of prompts, each once
  };

  struct StepTimes {
    int64_t began_us = 0;
    int64_t scheduled_us = 0;  // what the scheduler was told
    PhaseDurations durations;
  };

  // inbox.cpp
  void check_alive() const;  // with inbox_mutex_
  void check_token_ids(std::span<const TokenId> tokens) const;
  void check_params(const SamplingParams& params) const;
  void prepare_logits(Request& request, std::span<const TokenId> prompt) const;
  SchedulerStats scheduler_stats() const;  // with inbox_mutex_
  void check_queue(size_t num_prompt_tokens) const;
  uint64_t cache_key(const RequestOptions& options);

  // step.cpp
  void retire_finished();
  void take_inbox();
  void file(std::shared_ptr<Request> request);
  void run_scheduled(StepTimes times);
  SampleParams build_samples(const SchedulerOutput& output);
  void build_scores(const SchedulerOutput& output, ForwardBatch& batch);
  void score_prompts(TeamMember& member, const ForwardBatch& batch);
  void take_samples();
  void report(const Sequence& sequence, const SampleResult* sample);
  void publish(const SchedulerOutput& output, const StepTimes& times, int64_t ended_us);
  [[noreturn]] void fail(const std::exception& error);

  const EngineConfig config_;
  const ModelConfig model_config_;
  int num_threads_ = 0;
  std::string isa_;
  std::vector<LinearWeights> linear_weights_;
  void* cuda_stream_ = nullptr;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Runner> runner_;

  // Shared with the threads that add and abort.
  mutable std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Request>> added_;
  std::vector<SampleIds> aborted_;
  QueueSize unseen_;  // added, and not yet among what the scheduler says in stats_
  std::unordered_map<std::string, SampleIds> in_flight_;  // accepted, not yet reported as ended
  std::unordered_map<std::string, uint64_t> cache_keys_;
  uint64_t last_cache_key_ = 0;
  uint64_t num_requests_ = 0;  // accepted since the start
  SequenceId next_sequence_ = 0;
  bool accepting_ = true;
  bool closed_ = false;
  bool failed_ = false;
  std::string failure_;  // why
  EngineStats stats_;
  IterationStatsRing iterations_;

  // Held by step().
  mutable std::mutex step_mutex_;
  std::vector<std::shared_ptr<Request>> taken_;  // the inbox, swapped out
  std::vector<SampleIds> taken_aborts_;
  QueueSize taken_size_;
  std::unordered_map<SequenceId, std::shared_ptr<Request>> requests_;  // by sample: known to the scheduler
  std::vector<SequenceId> ended_;  // reported by the last step; they go at the next
  std::vector<StepOutput> outputs_;
  std::unique_ptr<Trace> trace_;  // null: none
};

}  // namespace steploop
