// Engine::Runner: the exec, the decoder and the buffers of a step.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/input_batch.h"
#include "model/decoder.h"

namespace steploop {

struct Engine::Runner {
  Runner(std::shared_ptr<const Model> model_in, const EngineConfig& config);

  // Median microseconds that a block takes to the host pool or back; 0 if either pool is empty. Needs an idle engine.
  double measure_swap_block_us(const BlockManagerConfig& blocks);

  std::shared_ptr<const Model> model;
  std::unique_ptr<Exec> exec;  // a ProfiledExec where the configuration says so
  Decoder decoder;
  InputBatch batch;
  std::vector<SampleRow> rows;
  std::vector<SampleResult> results;
  std::vector<SampledTokens> sampled;
  std::vector<ScoredToken> scored;     // of prompts, in the step in progress
  std::vector<int32_t> scored_rows;    // the rows they belong to
  int32_t num_rows = 0;  // of the last step
};

// The most sequences of a step.
int32_t max_num_running(const EngineConfig& config);

ExecOptions exec_options(const ModelConfig& model, const EngineConfig& config);
Decoder::Limits decoder_limits(const EngineConfig& config);

}  // namespace steploop
