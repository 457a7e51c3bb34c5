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

#include "engine/input_batch.h"
#include "model/decoder.h"
#include "sample/sampling_params.h"
#include "sched/scheduler.h"

namespace steploop {

struct EngineConfig {
  int32_t max_model_len = 0;
  int32_t max_num_seqs = 64;
  int32_t max_num_batched_tokens = 2048;
  int32_t block_size = 16;   // tokens
  int32_t num_kv_blocks = 0;
  DType kv_dtype = DType::kFloat32;
  int32_t num_threads = 0;   // 0: default_num_threads()
  MatmulFunction matmul = nullptr;  // CUDA: gives up batch invariance for another library's speed
  uint64_t seed = 0;
  SchedulingPolicy policy = SchedulingPolicy::kOnDemand;
  std::vector<TokenId> eos_token_ids;
};

struct Request {
  std::string id;
  SequenceId sequence = 0;  // arrival number
  SamplingParams params;
  std::vector<TokenId> prompt;          // moved out when the scheduler takes the request
  StopCriteria stop;
  std::vector<TokenId> stop_token_ids;  // eos and the request's own: masked until min_tokens
  uint64_t seed = 0;
  int64_t arrival_us = 0;
};

// What a step did for one request: at most one new token, and whether that ended it.
struct StepOutput {
  const Request* request = nullptr;
  bool has_token = false;
  TokenId token = -1;
  const SampleResult* sample = nullptr;  // null without a token
  FinishReason finish_reason = FinishReason::kNone;
  TokenId stop_token = -1;  // of the request's own stop_token_ids, else -1
  int32_t num_preemptions = 0;
  int64_t first_scheduled_us = -1;
  int64_t first_token_us = -1;
  int64_t last_token_us = -1;
};

struct PhaseDurations {
  int64_t schedule_us = 0;
  int64_t build_us = 0;
  int64_t forward_us = 0;
  int64_t sample_us = 0;
  int64_t update_us = 0;
};

struct EngineStats {
  SchedulerStats scheduler;
  int32_t num_queued = 0;  // added, not yet seen by a step; counted as waiting
  int32_t last_num_sequences = 0;
  int32_t last_num_prompt_tokens = 0;
  int32_t last_num_decode_tokens = 0;
  PhaseDurations last;
  PhaseDurations total;
};

class Engine {
 public:
  // Throws InvalidArgumentError for limits that contradict each other or a pool below one sequence of max_model_len.
  Engine(std::shared_ptr<const Model> model, const EngineConfig& config);
  ~Engine();

  // Device memory that an engine takes beside the weights and the KV cache: activations and the exec's own. 0 on the
  // CPU, where memory counts once it is used.
  // Throws UnsupportedDeviceError and UnsupportedModelError for what the device cannot run, InvalidArgumentError.
  static int64_t activation_bytes(const ModelConfig& model, DType dtype, Device device, const EngineConfig& config);

  // Any thread, also while step() runs: the next step takes the request in. arrival_us: steady-clock microseconds.
  // Throws InvalidRequestError, RequestTooLongError, DuplicateRequestError, EngineDeadError.
  void add_request(std::string request_id, std::vector<TokenId> prompt, const SamplingParams& params,
                   std::optional<int64_t> arrival_us = std::nullopt);

  // Any thread. False if there is no such request in flight. The next step reports it as ended.
  bool abort_request(const std::string& request_id);

  // One iteration; hands what it did to `consume`, the outputs being valid only during that call. One step at a time: a
  // second caller waits. A failure inside marks the engine dead: this throws EngineDeadError now and ever after.
  void step(FunctionRef<void(std::span<const StepOutput>)> consume);

  bool has_unfinished_requests() const { return num_unfinished_requests() > 0; }
  int32_t num_unfinished_requests() const;  // accepted and not yet reported as ended
  EngineStats stats() const;  // as of the last step
  void close();  // waits for a step in progress; frees all memory; idempotent
  bool closed() const;

  const EngineConfig& config() const { return config_; }
  const ModelConfig& model_config() const { return model_config_; }
  int num_threads() const { return num_threads_; }
  const std::string& isa() const { return isa_; }
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

  void check_alive() const;  // with inbox_mutex_
  void check_token_ids(std::span<const TokenId> tokens) const;
  void take_inbox();
  void run_scheduled();
  SampleParams build_samples(const SchedulerOutput& output);
  void take_samples();
  void report(const Sequence& sequence, const SampleResult* sample);
  [[noreturn]] void fail(const std::exception& error);
  void retire_finished();

  const EngineConfig config_;
  const ModelConfig model_config_;
  int num_threads_ = 0;
  std::string isa_;
  void* cuda_stream_ = nullptr;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Runner> runner_;

  // Shared with the threads that add and abort.
  mutable std::mutex inbox_mutex_;
  std::vector<std::unique_ptr<Request>> added_;
  std::vector<SequenceId> aborted_;
  std::unordered_map<std::string, SequenceId> in_flight_;  // accepted, not yet reported as ended
  SequenceId next_sequence_ = 0;
  bool closed_ = false;
  bool failed_ = false;
  std::string failure_;  // why
  EngineStats stats_;

  // Held by step().
  mutable std::mutex step_mutex_;
  std::vector<std::unique_ptr<Request>> taken_;  // the inbox, swapped out
  std::vector<SequenceId> taken_aborts_;
  std::unordered_map<SequenceId, std::unique_ptr<Request>> requests_;  // known to the scheduler
  std::vector<SequenceId> ended_;  // reported by the last step; their requests go at the next
  std::vector<StepOutput> outputs_;
  PhaseDurations durations_;
};

}  // namespace steploop
