// The CPU sampler: from one row of logits to one token.
//
// In this order: what process_logits does -> temperature -> min_p -> top_k -> top_p -> draw.
// - Ranks are by logit, equal logits by token id, the lower first.
// - Greedy (temperature below 1e-5, or top_k 1) takes the first rank.
// - min_p drops tokens whose probability is less than so much of the likeliest one's; never that one.
// - top_k keeps exactly k tokens of those. top_p then keeps the shortest prefix of the ranks that holds at least top_p of the
//   probability of what min_p and top_k kept; always one token or more.
// - The draw is one number in (0, 1) of (seed, sample_index, position), taken through the inverse of the cumulative
//   distribution: by token id if nothing was cut, else by rank. With a cut, probabilities below e^-32 of the largest
//   count as 0.
// - Log-probabilities are those of the model: of the row as it came, before all of this.
// Nothing but the row and these values enters, so a token does not depend on the batch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "sample/sampling_params.h"
#include "sample/token_counts.h"

namespace steploop {

struct SampleRow {
  const float* logits = nullptr;  // [vocab_size]
  const SamplingParams* params = nullptr;
  uint64_t seed = 0;  // the request's own, or the one it was given on arrival
  int32_t sample_index = 0;  // which of the request's samples
  int64_t position = 0;  // of the token to come, in its sequence
  bool mask_stop_tokens = false;  // min_tokens is not reached yet
  std::span<const TokenId> stop_token_ids;  // masked then: eos (unless ignored) and the request's own
  // [ceil(vocab_size / 32)], bit 0 first, a set bit allows; null: all
  const uint32_t* allowed_bitmask = nullptr;  // allowed_token_ids
  const uint32_t* grammar_bitmask = nullptr;
  std::span<const TokenId> output_tokens;  // so far; of params with bad_words
  const TokenCounts* counts = nullptr;  // of params with penalties
};

struct TopLogprob {
  TokenId token;
  float logprob;
};

struct SampleResult {
  TokenId token = -1;
  bool failed = false;  // a NaN or +inf in the row, or no token that may come; then nothing else holds a value
  float logprob = 0;  // of the token, if params->logprobs >= 0
  int32_t rank = 0;  // of the token in the row as it came, from 1; 0: not counted (on a GPU, with params->logprobs 0)
  int32_t num_top = 0;  // tokens of logit -inf are left out
  TopLogprob top[kMaxTopLogprobs];  // by rank
};

// A token that came by itself, and how likely it was: its result is that of a row which chose it. A NaN or +inf in the
// row: failed, and the logprob is NaN.
struct ScoredToken {
  TokenId token = -1;
  int32_t num_top = 0;  // the most likely tokens to name, up to kMaxTopLogprobs
  SampleResult* result = nullptr;
};

// Working memory of one thread, taken once.
class SamplerScratch {
 public:
  explicit SamplerScratch(int32_t vocab_size);
  int32_t vocab_size() const { return vocab_size_; }

 private:
  friend class RowSampler;
  friend class RowLogprobs;
  friend void score_row(const float* logits, SamplerScratch& scratch, const ScoredToken& token);

  // A token that may survive top_k and top_p.
  struct Candidate {
    float logit;
    TokenId token;
    float weight;  // exp((logit - max) / temperature)
    int32_t bucket;
  };
  // Candidates of similar distance (max - logit) / temperature; a lower bucket holds higher ranks.
  struct Bucket {
    double count;
    double weight;
  };
  static constexpr int32_t kNumBuckets = 512;

  int32_t vocab_size_;
  std::unique_ptr<float[]> logits_;  // [vocab_size], after process_logits
  std::unique_ptr<float[]> block_max_;  // [num_row_blocks]
  std::unique_ptr<float[]> block_buffer_;  // [num_row_blocks]
  std::unique_ptr<double[]> block_sum_;  // [num_row_blocks]
  std::unique_ptr<Candidate[]> candidates_;  // [vocab_size]
  Bucket buckets_[kNumBuckets];
};

void score_row(const float* logits /* [vocab_size] */, SamplerScratch& scratch, const ScoredToken& token);
void sample_row(const SampleRow& row, SamplerScratch& scratch, SampleResult& result);

}  // namespace steploop
