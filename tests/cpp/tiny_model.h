// A small model with random weights, for programs that run the whole engine without Python.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "engine/engine.h"

inline std::shared_ptr<steploop::Model> make_tiny_model(steploop::DType dtype) {
  steploop::ModelConfig config;
  config.vocab_size = 300;
  config.hidden_size = 96;
  config.intermediate_size = 160;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.max_position_embeddings = 1024;
  config.qkv_bias = true;
  config.qk_norm = true;
  auto model = std::make_shared<steploop::Model>(config, dtype, steploop::Device::kCpu);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  for (const auto& [name, shape] : model->expected_weights()) {
    steploop::TensorView view;
    view.ndim = static_cast<int>(shape.size());
    int64_t count = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
      view.shape[static_cast<size_t>(i)] = shape[static_cast<size_t>(i)];
      view.strides[static_cast<size_t>(i)] = count;
      count *= shape[static_cast<size_t>(i)];
    }
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random) + (name.find("norm") == std::string::npos ? 0.0f : 1.0f);
    view.data = values.data();
    model->load_weight(name, view);
  }
  model->finish_loading();
  return model;
}

inline steploop::EngineConfig tiny_engine_config(steploop::DType dtype) {
  steploop::EngineConfig config;
  config.scheduler.max_model_len = 160;
  config.scheduler.max_num_seqs = 16;
  config.scheduler.max_num_batched_tokens = 48;
  config.scheduler.blocks.num_blocks = 48;
  config.scheduler.blocks.block_size = 8;
  config.kv_dtype = dtype;
  config.num_threads = 2;
  return config;
}
