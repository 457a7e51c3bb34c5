// CostModel: a roofline with named efficiencies.
#include "sim/cost_model.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"

namespace steploop {
namespace {

constexpr double kUsPerSecond = 1e6;

void check_share(const char* name, double value) {
  if (!std::isfinite(value) || value < 0 || value > 1)
    throw InvalidArgumentError(concat(name, " must be in [0, 1], got ", value));
}

void check_amount(const char* name, double value) {
  if (!std::isfinite(value) || value < 0)
    throw InvalidArgumentError(concat(name, " must be a finite number >= 0, got ", value));
}

void check_rate(const char* name, double value) {
  if (!std::isfinite(value) || value <= 0)
    throw InvalidArgumentError(concat(name, " must be a finite number > 0, got ", value));
}

}  // namespace

StepWork work_of(const SchedulerOutput& output) {
  StepWork work;
  work.num_tokens = output.num_scheduled_tokens;
  work.num_sequences = static_cast<int64_t>(output.scheduled.size());
  work.num_sample_rows = output.num_sample_rows;
  work.num_transfer_blocks = static_cast<int64_t>(output.transfers.size());
  for (const ScheduledSequence& scheduled : output.scheduled) {
    const int64_t first = scheduled.first_token, count = scheduled.num_scheduled_tokens;
    if (count == 1) {
      work.num_decode_keys += first + 1;
    } else {
      work.num_prompt_pairs += count * first + count * (count + 1) / 2;
    }
  }
  return work;
}

CostModel::CostModel(const CostModelConfig& config) : config_(config) {
  const CostModelConfig& c = config;
  check_amount("weight_bytes", c.weight_bytes);
  check_amount("weight_flops_per_token", c.weight_flops_per_token);
  check_amount("output_bytes", c.output_bytes);
  check_amount("output_flops_per_row", c.output_flops_per_row);
  check_amount("kv_bytes_per_token", c.kv_bytes_per_token);
  check_amount("attention_flops_per_pair", c.attention_flops_per_pair);
  check_amount("block_bytes", c.block_bytes);
  check_rate("bytes_per_second", c.bytes_per_second);
  check_rate("flops_per_second", c.flops_per_second);
  check_amount("host_bytes_per_second", c.host_bytes_per_second);
  check_rate("weight_bandwidth_efficiency", c.weight_bandwidth_efficiency);
  check_rate("compute_efficiency", c.compute_efficiency);
  check_rate("kv_bandwidth_efficiency", c.kv_bandwidth_efficiency);
  check_rate("attention_compute_efficiency", c.attention_compute_efficiency);
  check_share("overlap", c.overlap);
  check_amount("step_us", c.step_us);
  check_amount("sequence_us", c.sequence_us);
  check_amount("sample_row_us", c.sample_row_us);
  check_amount("token_us", c.token_us);
}

double CostModel::linear_us(double bytes, double flops) const {
  const double reading = bytes / (config_.bytes_per_second * config_.weight_bandwidth_efficiency);
  const double computing = flops / (config_.flops_per_second * config_.compute_efficiency);
  return kUsPerSecond * (std::max(reading, computing) + (1 - config_.overlap) * std::min(reading, computing));
}

double CostModel::duration_us(const StepWork& work) const {
  const CostModelConfig& c = config_;
  const auto tokens = static_cast<double>(work.num_tokens), rows = static_cast<double>(work.num_sample_rows);
  double us = c.step_us + c.sequence_us * static_cast<double>(work.num_sequences) + c.sample_row_us * rows +
              c.token_us * tokens + linear_us(c.weight_bytes, c.weight_flops_per_token * tokens);
  if (work.num_sample_rows > 0) us += linear_us(c.output_bytes, c.output_flops_per_row * rows);
  us += kUsPerSecond * static_cast<double>(work.num_decode_keys) * c.kv_bytes_per_token /
        (c.bytes_per_second * c.kv_bandwidth_efficiency);
  us += kUsPerSecond * static_cast<double>(work.num_prompt_pairs) * c.attention_flops_per_pair /
        (c.flops_per_second * c.attention_compute_efficiency);
  if (c.host_bytes_per_second > 0)
    us += kUsPerSecond * static_cast<double>(work.num_transfer_blocks) * c.block_bytes / c.host_bytes_per_second;
  return us;
}

}  // namespace steploop
