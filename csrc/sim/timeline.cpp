// Timeline: points of ever more steps.
#include "sim/timeline.h"

#include <algorithm>

namespace steploop {

void TimelinePoint::add(const TimelinePoint& later) {
  ended_us = std::max(ended_us, later.ended_us);
  busy_us += later.busy_us;
  sequences_us += later.sequences_us;
  unfinished_us += later.unfinished_us;
  used_blocks_us += later.used_blocks_us;
  num_steps += later.num_steps;
  num_prompt_tokens += later.num_prompt_tokens;
  num_decode_tokens += later.num_decode_tokens;
  longest_step_us = std::max(longest_step_us, later.longest_step_us);
}

void Timeline::add(const TimelinePoint& step) {
  if (!points_.empty() && points_.back().num_steps < steps_per_point_) {
    points_.back().add(step);
    return;
  }
  if (points_.size() == max_points_) {
    for (size_t i = 0; i < points_.size() / 2; ++i) {
      points_[i] = points_[2 * i];
      points_[i].add(points_[2 * i + 1]);
    }
    if (points_.size() % 2) points_[points_.size() / 2] = points_.back();
    points_.resize((points_.size() + 1) / 2);
    steps_per_point_ *= 2;
    add(step);
    return;
  }
  points_.push_back(step);
}

}  // namespace steploop
