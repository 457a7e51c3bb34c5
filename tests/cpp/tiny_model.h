// A small model with random weights, for programs that run the whole engine without Python.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"

// How the weight of this name is stored.
inline steploop::LinearFormat tiny_format(const steploop::LinearFormats& formats, const std::string& name) {
  const auto is = [&](const char* part) { return name.find(part) != std::string::npos && name.ends_with(".weight"); };
  if (name == "lm_head.codes") return formats.lm_head;
  if (is("q_proj") || is("k_proj") || is("v_proj")) return formats.qkv;
  if (is("o_proj")) return formats.o;
  if (is("gate_proj") || is("up_proj")) return formats.gate_up;
  return is("down_proj") ? formats.down : steploop::LinearFormat{};
}

inline void load_random_codes(steploop::Model& model, const std::string& name, const std::vector<int64_t>& shape,
                              steploop::Quantization quantization, std::mt19937& random) {
  const bool int4 = quantization == steploop::Quantization::kInt4;
  const int64_t group = int4 ? steploop::kInt4Group : steploop::quantized_input_group(quantization, shape[1]);
  const auto count = static_cast<size_t>(shape[0] * shape[1]);
  const auto num_groups = static_cast<size_t>(shape[0] * steploop::ceil_div(shape[1], group));
  std::vector<uint8_t> codes(count);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(int4 ? random() % 16 : random() % 255 - 127);
  const std::vector<float> scales(num_groups, 0.1f / 74);  // a deviation of 0.1, as other weights have
  const std::vector<uint16_t> half_scales(num_groups, steploop::float_to_fp16(0.1f / 4.6f));
  const std::vector<uint16_t> half_minimums(num_groups, steploop::float_to_fp16(-7.5f * 0.1f / 4.6f));
  model.load_quantized_weight(
      name, {quantization, shape[0], shape[1], codes.data(), scales.data(), half_scales.data(), half_minimums.data()});
}

inline std::shared_ptr<steploop::Model> make_tiny_model(steploop::DType dtype,
                                                        const steploop::LinearFormats& formats = {}) {
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
  config.formats = formats;
  auto model = std::make_shared<steploop::Model>(config, dtype, steploop::Device::kCpu);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  for (const auto& [name, shape] : model->expected_weights()) {
    if (const steploop::LinearFormat format = tiny_format(formats, name); format.is_quantized()) {
      load_random_codes(*model, name, shape, format.quantization, random);
      continue;
    }
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
