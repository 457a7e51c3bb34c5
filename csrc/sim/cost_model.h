// How long a step takes on some device: from the amounts it moves and computes, and from nothing else.
#pragma once

#include <cstdint>

#include "sched/scheduler_output.h"

namespace steploop {

// The amounts of one step that its duration is made of.
struct StepWork {
  int64_t num_tokens = 0;       // rows of the linear layers
  int64_t num_sequences = 0;
  int64_t num_sample_rows = 0;  // rows of the output layer
  int64_t num_decode_keys = 0;  // keys that sequences with one token attend to, summed
  int64_t num_prompt_pairs = 0;  // (query, key) pairs of those with more tokens, summed
  int64_t num_transfer_blocks = 0;
};

StepWork work_of(const SchedulerOutput& output);

// Rates are of one device, bytes and operations its share of the model's. Each efficiency is what is reached of a rate.
struct CostModelConfig {
  // The model.
  double weight_bytes = 0;             // of the linear layers, read by every step
  double weight_flops_per_token = 0;   // two for each weight
  double output_bytes = 0;             // of the output layer, read by every step that samples
  double output_flops_per_row = 0;
  double kv_bytes_per_token = 0;
  double attention_flops_per_pair = 0;  // of one query and one key, all layers and heads
  double block_bytes = 0;               // of a KV block, as it moves to the host or back

  // The device.
  double bytes_per_second = 0;
  double flops_per_second = 0;
  double host_bytes_per_second = 0;  // of block transfers; 0: they take no time

  // What is reached.
  double weight_bandwidth_efficiency = 1;
  double compute_efficiency = 1;
  double kv_bandwidth_efficiency = 1;
  double attention_compute_efficiency = 1;
  double overlap = 1;  // of reading weights and computing with them: 1: the longer counts; 0: their sum

  // What comes on top.
  double step_us = 0;        // of every step
  double sequence_us = 0;    // for each sequence in it
  double sample_row_us = 0;  // for each row that is sampled
  double token_us = 0;       // for each token: work that is not in the linear layers, and exchange between devices
};

class CostModel {
 public:
  // Throws InvalidArgumentError for what is not finite, negative, or zero where it divides.
  explicit CostModel(const CostModelConfig& config);

  double duration_us(const StepWork& work) const;

 private:
  double linear_us(double bytes, double flops) const;

  CostModelConfig config_;
};

}  // namespace steploop
