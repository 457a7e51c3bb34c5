// StepCostModel: weighted least squares with two unknowns.
#include "sched/step_cost.h"

#include <algorithm>

namespace steploop {

namespace {

constexpr double kAgeing = 0.95;  // a step's weight against the next one's: about the last 20 count

}  // namespace

void StepCostModel::observe(int32_t num_tokens, int64_t duration_us) {
  const double tokens = num_tokens, us = static_cast<double>(duration_us);
  weight_ = weight_ * kAgeing + 1;
  tokens_ = tokens_ * kAgeing + tokens;
  us_ = us_ * kAgeing + us;
  tokens_squared_ = tokens_squared_ * kAgeing + tokens * tokens;
  tokens_us_ = tokens_us_ * kAgeing + tokens * us;
}

double StepCostModel::slope() const {
  const double spread = weight_ * tokens_squared_ - tokens_ * tokens_;  // weight^2 * variance
  // Steps of nearly one size say nothing about others.
  if (spread < 1e-3 * tokens_ * tokens_ || empty()) return -1;
  return std::max(0.0, (weight_ * tokens_us_ - tokens_ * us_) / spread);
}

// The line through the mean with the slope seen, held between "all is fixed" and "nothing is".
double StepCostModel::token_us() const {
  if (empty()) return 0;
  const double proportional = us_ / tokens_;
  const double slope_us = slope();
  return slope_us < 0 ? proportional : std::min(slope_us, proportional);
}

double StepCostModel::fixed_us() const { return empty() ? 0 : (us_ - token_us() * tokens_) / weight_; }

int32_t StepCostModel::tokens_within(int64_t duration_us, int32_t most) const {
  if (empty()) return most;
  const double mean_tokens = tokens_ / weight_;
  double tokens = (static_cast<double>(duration_us) - fixed_us()) / std::max(token_us(), 1e-9);
  if (slope() < 0) tokens = std::min(tokens, 2 * mean_tokens);
  return static_cast<int32_t>(std::clamp(tokens, 1.0, static_cast<double>(most)));
}

}  // namespace steploop
