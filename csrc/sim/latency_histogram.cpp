// LatencyHistogram: buckets by the binary logarithm.
#include "sim/latency_histogram.h"

#include <algorithm>
#include <cmath>

namespace steploop {
namespace {

constexpr double kBucketsPerDoubling = 256;

size_t bucket_of(int64_t duration_us) {
  return static_cast<size_t>(std::lround(std::log2(static_cast<double>(duration_us)) * kBucketsPerDoubling));
}

}  // namespace

void LatencyHistogram::add(int64_t duration_us, int64_t count) {
  duration_us = std::max<int64_t>(duration_us, 1);
  const size_t bucket = bucket_of(duration_us);
  if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
  buckets_[bucket] += count;
  count_ += count;
  max_us_ = std::max(max_us_, duration_us);
  sum_us_ += static_cast<double>(duration_us) * static_cast<double>(count);
}

double LatencyHistogram::quantile_us(double share) const {
  if (count_ == 0) return 0;
  const auto rank = std::max<int64_t>(0, static_cast<int64_t>(std::ceil(share * static_cast<double>(count_))) - 1);
  int64_t below = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    below += buckets_[i];
    if (below > rank)
      return std::min(std::exp2(static_cast<double>(i) / kBucketsPerDoubling), static_cast<double>(max_us_));
  }
  return static_cast<double>(max_us_);
}

}  // namespace steploop
