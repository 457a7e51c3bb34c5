// Checks of SamplingParams.
#include "sample/sampling_params.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>

#include "core/errors.h"

namespace steploop {
namespace {

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
  require(n >= 1, "n must be >= 1", std::to_string(n));
  require(std::isfinite(temperature) && temperature >= 0, "temperature must be finite and >= 0", to_text(temperature));
  require(top_k >= -1, "top_k must be >= 1, or 0 or -1 for all tokens", std::to_string(top_k));
  require(top_p > 0 && top_p <= 1, "top_p must be in (0, 1]", to_text(top_p));
  require(max_tokens >= 1, "max_tokens must be >= 1", std::to_string(max_tokens));
  require(min_tokens >= 0, "min_tokens must be >= 0", std::to_string(min_tokens));
  if (min_tokens > max_tokens)
    throw InvalidRequestError(concat("min_tokens must be <= max_tokens (", max_tokens, "), got ", min_tokens));
  for (const TokenId id : stop_token_ids) require(id >= 0, "stop_token_ids must be >= 0", std::to_string(id));
  if (logprobs < -1 || logprobs > kMaxTopLogprobs)
    throw InvalidRequestError(concat("logprobs must be in 0..", kMaxTopLogprobs, ", or None, got ", logprobs));
}

}  // namespace steploop
