// Counts of durations in buckets of one relative width, so that any number of them takes the same memory.
#pragma once

#include <cstdint>
#include <vector>

namespace steploop {

// Durations from 1 us on, in 256 buckets for each doubling: a quantile is off by at most 0.14%.
class LatencyHistogram {
 public:
  void add(int64_t duration_us, int64_t count = 1);

  int64_t count() const { return count_; }
  double mean_us() const { return count_ ? sum_us_ / static_cast<double>(count_) : 0; }
  int64_t max_us() const { return max_us_; }
  double quantile_us(double share) const;  // 0 without durations

 private:
  std::vector<int64_t> buckets_;
  int64_t count_ = 0;
  int64_t max_us_ = 0;
  double sum_us_ = 0;
};

}  // namespace steploop
