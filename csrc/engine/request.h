// A request on its way through the engine, and what a step did for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sample/sampler.h"
#include "sample/sampling_params.h"
#include "sample/token_bitmask.h"
#include "sched/sequence.h"

namespace steploop {

// What a request may say beside its prompt and sampling parameters.
struct RequestOptions {
  int32_t priority = 0;                   // QueueOrderKind::kPriority: lower goes first
  std::optional<std::string> tenant;      // QueueOrderKind::kFair: whose turn it takes; not empty
  std::optional<std::string> cache_salt;  // cached blocks are shared among requests of one salt; without, of one tenant
  std::optional<double> deadline_ms;  // after arrival: from then on it ends with kTimeout; > 0
  std::optional<int64_t> arrival_us;  // steady clock; none: now
  // A row a sample, read by each step: the caller may write it between two. Null: all tokens may come.
  std::shared_ptr<const TokenBitmask> token_bitmask;
};

// Ids of the samples of one request: consecutive.
struct SampleIds {
  SequenceId first = 0;
  int32_t count = 0;
};

struct Request {
  std::string id;
  SampleIds samples;
  SamplingParams params;
  // These three move out when the scheduler takes the request.
  std::vector<TokenId> prompt;
  StopCriteria stop;
  SequenceOptions options;
  std::vector<TokenId> stop_token_ids;  // eos and the request's own: masked until min_tokens
  std::vector<uint32_t> allowed_bitmask;  // of allowed_token_ids; empty: all may come
  std::shared_ptr<const TokenBitmask> token_bitmask;  // null: all may come
  std::vector<TokenCounts> counts;  // by sample, where there are penalties
  std::vector<SampleResult> prompt_scores;  // with prompt_logprobs: of each token of the prompt but the first
  int32_t num_prompt_scores = 0;  // that are there, whichever sample brought them
  bool prompt_scores_reported = false;
  uint64_t seed = 0;  // of all samples; their numbers differ by sample_index
  int64_t arrival_us = 0;
  int32_t num_unfinished = 0;  // samples
};

// What a step did for one sample of a request: at most one new token, and whether that ended it.
struct StepOutput {
  const Request* request = nullptr;
  int32_t index = 0;  // of the sample
  bool has_token = false;
  TokenId token = -1;
  const SampleResult* sample = nullptr;  // null without a token
  bool brings_prompt_scores = false;  // the request's are complete, and none of its outputs has brought them before
  FinishReason finish_reason = FinishReason::kNone;
  TokenId stop_token = -1;  // of the request's own stop_token_ids, else -1
  bool request_finished = false;  // all its samples have ended, this one last
  int32_t num_preemptions = 0;
  int32_t num_cached_tokens = 0;  // of the prompt, found in the prefix cache or computed for another sample
  int64_t first_scheduled_us = -1;
  int64_t first_token_us = -1;
  int64_t last_token_us = -1;
};

}  // namespace steploop
