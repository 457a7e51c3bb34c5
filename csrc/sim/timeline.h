// What a simulation did over time, in a bounded number of points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace steploop {

// Sums over the steps of one stretch of time; each step counts for as long as it took.
struct TimelinePoint {
  int64_t began_us = 0;
  int64_t ended_us = 0;     // of the last of the steps
  int64_t busy_us = 0;      // of all steps; beyond ended - began where several replicas step at once
  double sequences_us = 0;  // sequences in a step, times its duration
  double unfinished_us = 0;
  double used_blocks_us = 0;
  int64_t num_steps = 0;
  int64_t num_prompt_tokens = 0;
  int64_t num_decode_tokens = 0;
  int64_t longest_step_us = 0;

  void add(const TimelinePoint& later);
};

// Neighbours are joined whenever there are more points than that.
class Timeline {
 public:
  explicit Timeline(size_t max_points) : max_points_(max_points) {}  // >= 2

  void add(const TimelinePoint& step);
  const std::vector<TimelinePoint>& points() const { return points_; }

 private:
  size_t max_points_;
  int64_t steps_per_point_ = 1;
  std::vector<TimelinePoint> points_;
};

}  // namespace steploop
