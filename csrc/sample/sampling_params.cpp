// Checks of SamplingParams.
#include "sample/sampling_params.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>

#include "core/errors.h"

namespace steploop {
namespace {

constexpr double kMaxPenalty = 2;

void require(bool holds, const char* what_must_hold, const std::string& given) {
  if (!holds) throw InvalidRequestError(concat(what_must_hold, ", got ", given));
}

std::string to_text(double value) {
  if (std::isnan(value)) return "nan";  // printf may write -nan
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

}  // namespace

float SamplingParams::logit_scale() const {
  // FLT_MIN: scaled by it, -inf stays -inf even where 1 / temperature underflows.
  return is_greedy() ? 0.0f : std::max(static_cast<float>(1.0 / temperature), FLT_MIN);
}

void SamplingParams::validate() const {
  const auto require_penalty = [](const char* what_must_hold, double value) {
    require(value >= -kMaxPenalty && value <= kMaxPenalty, what_must_hold, to_text(value));
  };
  require(n >= 1, "n must be >= 1", std::to_string(n));
  require(std::isfinite(temperature) && temperature >= 0, "temperature must be finite and >= 0", to_text(temperature));
  require(top_k >= -1, "top_k must be >= 1, or 0 or -1 for all tokens", std::to_string(top_k));
  require(top_p > 0 && top_p <= 1, "top_p must be in (0, 1]", to_text(top_p));
  require(min_p >= 0 && min_p <= 1, "min_p must be in [0, 1]", to_text(min_p));
  require(std::isfinite(repetition_penalty) && repetition_penalty > 0, "repetition_penalty must be finite and > 0",
          to_text(repetition_penalty));
  require_penalty("presence_penalty must be in [-2, 2]", presence_penalty);
  require_penalty("frequency_penalty must be in [-2, 2]", frequency_penalty);
  for (const auto& [token, bias] : logit_bias) {
    require(token >= 0, "the tokens of logit_bias must be >= 0", std::to_string(token));
    require(std::isfinite(bias), "the values of logit_bias must be finite", to_text(bias));
  }
  for (const TokenId id : allowed_token_ids) require(id >= 0, "allowed_token_ids must be >= 0", std::to_string(id));
  for (const std::vector<TokenId>& word : bad_words) {
    require(!word.empty(), "each of bad_words must have a token or more", "none");
    for (const TokenId id : word) require(id >= 0, "the tokens of bad_words must be >= 0", std::to_string(id));
  }
  require(max_tokens >= 1, "max_tokens must be >= 1", std::to_string(max_tokens));
  require(min_tokens >= 0, "min_tokens must be >= 0", std::to_string(min_tokens));
  if (min_tokens > max_tokens)
    throw InvalidRequestError(concat("min_tokens must be <= max_tokens (", max_tokens, "), got ", min_tokens));
  for (const TokenId id : stop_token_ids) require(id >= 0, "stop_token_ids must be >= 0", std::to_string(id));
  const auto check_logprobs = [](const char* name, int32_t count) {
    if (count < -1 || count > kMaxTopLogprobs)
      throw InvalidRequestError(concat(name, " must be in 0..", kMaxTopLogprobs, ", or None, got ", count));
  };
  check_logprobs("logprobs", logprobs);
  check_logprobs("prompt_logprobs", prompt_logprobs);
}

}  // namespace steploop
