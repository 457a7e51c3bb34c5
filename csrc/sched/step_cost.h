// How long steps take, learned from those seen: duration = fixed part + tokens * part per token.
#pragma once

#include <cstdint>

namespace steploop {

// Least squares over past steps, each weighing less as it ages.
class StepCostModel {
 public:
  void observe(int32_t num_tokens, int64_t duration_us);

  bool empty() const { return weight_ <= 0; }
  double token_us() const;  // >= 0; 0 while nothing was seen
  double fixed_us() const;  // >= 0
  // The most tokens of a step that is expected to take at most duration_us; at least 1. While only one size of step
  // has been seen, in proportion to that, and at most twice as much.
  int32_t tokens_within(int64_t duration_us, int32_t most) const;

 private:
  double slope() const;  // < 0: not known

  double weight_ = 0, tokens_ = 0, us_ = 0, tokens_squared_ = 0, tokens_us_ = 0;  // sums
};

}  // namespace steploop
