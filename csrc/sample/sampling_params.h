// How the tokens of one request are chosen and when it ends.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/types.h"

namespace steploop {

inline constexpr int32_t kMaxTopLogprobs = 20;

struct SamplingParams {
  int32_t n = 1;                        // samples of the same prompt, >= 1
  double temperature = 1.0;             // >= 0; below kGreedyTemperature the most likely token is taken
  int32_t top_k = 0;                    // keep the k most likely tokens; 0 or -1: all
  double top_p = 1.0;                   // in (0, 1]: then keep the fewest that hold this share of what is left
  double min_p = 0.0;  // in [0, 1]: drop tokens of less than this share of the likeliest's probability
  double repetition_penalty = 1.0;  // > 0: logits of tokens that the prompt or output has / this, negative ones * this
  double presence_penalty = 0.0;  // in [-2, 2]: subtracted from the logits of tokens that the output has
  double frequency_penalty = 0.0;  // in [-2, 2]: the same, for each time
  std::vector<std::pair<TokenId, float>> logit_bias;  // added; each token at most once
  std::vector<TokenId> allowed_token_ids;  // no others may come; empty: all may
  std::vector<std::vector<TokenId>> bad_words;  // tokens that must not come one after another
  std::optional<uint64_t> seed;  // none: drawn from the engine's seed and the arrival number
  int32_t max_tokens = 16;  // output tokens, >= 1
  int32_t min_tokens = 0;  // output tokens before eos or a stop token may come
  std::vector<TokenId> stop_token_ids;  // end the request, beside the model's eos tokens
  bool ignore_eos = false;  // the model's eos tokens do not end the request
  int32_t logprobs = -1;  // -1: none; 0: of the chosen token; N: and of the N most likely
  int32_t prompt_logprobs = -1;  // the same, of each token of the prompt but the first

  static constexpr double kGreedyTemperature = 1e-5;

  bool has_penalties() const {
    return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
  }
  bool is_greedy() const { return temperature < kGreedyTemperature || top_k == 1; }
  float logit_scale() const;  // 1 / temperature, never 0 though it may underflow; 0: greedy
  void validate() const;  // throws InvalidRequestError that says what must hold and what was given
  bool operator==(const SamplingParams&) const = default;
};

}  // namespace steploop
