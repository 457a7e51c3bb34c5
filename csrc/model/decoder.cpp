// Decoder: one pass over the layers. Linear layers and norms see packed rows; only attention knows of sequences.
#include "model/decoder.h"

#include <cmath>
#include <numbers>

#include "core/check.h"

namespace steploop {

Decoder::Decoder(const Model& model, Exec& exec, const Limits& limits)
    : model_(model), config_(model.config()), exec_(exec), dtype_(model.dtype()) {
  SL_CHECK(model.finished(), "the model is not loaded");
  const auto tokens = static_cast<size_t>(limits.max_num_batched_tokens);
  const auto samples = static_cast<size_t>(limits.max_num_sample_rows);
  const size_t element = dtype_size(dtype_), hidden = static_cast<size_t>(config_.hidden_size);
  const size_t q_size = static_cast<size_t>(config_.q_size());
  auto floats = [&](size_t count) { return static_cast<float*>(exec_.allocate(count * sizeof(float))); };
  x_ = floats(tokens * hidden);
  x_sampled_ = floats(samples * hidden);
  normed_ = exec_.allocate(tokens * hidden * element);
  qkv_ = floats(tokens * static_cast<size_t>(config_.qkv_size()));
  q_ = exec_.allocate(tokens * q_size * dtype_size(limits.kv_dtype));
  attended_ = exec_.allocate(tokens * q_size * element);
  inner_ = exec_.allocate(tokens * static_cast<size_t>(config_.intermediate_size) * element);
  logits_ = floats(samples * static_cast<size_t>(config_.vocab_size));
  make_rope_table(limits.max_model_len);
  for (int32_t i = 0; i < config_.num_layers; ++i)
    kv_.push_back(exec_.make_kv_layer(limits.kv_dtype, config_.num_kv_heads, config_.head_dim, limits.block_size,
                                      limits.num_kv_blocks));
}

// Angles are products of float32 frequencies and positions, as in the models' own code. llama3: frequencies whose
// wavelength is long are divided by the factor, short ones kept, those between blended.
void Decoder::make_rope_table(int32_t max_position) {
  const int32_t half = config_.head_dim / 2;
  const size_t count = static_cast<size_t>(max_position) * static_cast<size_t>(half);
  std::vector<float> cosines(count), sines(count);
  for (int32_t i = 0; i < half; ++i) {
    float frequency = static_cast<float>(1.0 / std::pow(config_.rope_theta, 2.0 * i / config_.head_dim));
    const float factor = static_cast<float>(config_.rope_factor);
    if (config_.rope_scaling == RopeScaling::kLinear) {
      frequency /= factor;
    } else if (config_.rope_scaling == RopeScaling::kLlama3) {
      const double wavelength = 2.0 * std::numbers::pi / frequency;
      const double original = config_.rope_original_max_position_embeddings;
      const double low = config_.rope_low_freq_factor, high = config_.rope_high_freq_factor;
      if (wavelength > original / low) {
        frequency /= factor;
      } else if (wavelength >= original / high) {
        const float smooth = static_cast<float>((original / wavelength - low) / (high - low));
        frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
      }
    }
    for (int32_t position = 0; position < max_position; ++position) {
      const double angle = frequency * static_cast<float>(position);
      const size_t at = static_cast<size_t>(position) * static_cast<size_t>(half) + static_cast<size_t>(i);
      cosines[at] = static_cast<float>(std::cos(angle));
      sines[at] = static_cast<float>(std::sin(angle));
    }
  }
  rope_cos_ = static_cast<float*>(exec_.allocate(count * sizeof(float)));
  rope_sin_ = static_cast<float*>(exec_.allocate(count * sizeof(float)));
  exec_.upload(rope_cos_, cosines.data(), count * sizeof(float));
  exec_.upload(rope_sin_, sines.data(), count * sizeof(float));
}

void Decoder::forward(TeamMember& member, const ForwardBatch& batch) {
  exec_.embedding(member, model_.embedding(), {batch.token_ids, x_, batch.num_tokens, config_.hidden_size});
  const size_t last = model_.layers().size() - 1;
  for (size_t i = 0; i < last; ++i) {
    attention_block(member, batch, i);
    mlp_block(member, model_.layers()[i], x_, batch.num_tokens);
  }
  // Past the last layer's keys and values only the sampled rows matter.
  attention_block(member, batch, last);
  if (batch.num_sample_rows == 0) return;
  mlp_block(member, model_.layers()[last], x_sampled_, batch.num_sample_rows);
  norm(member, model_.final_norm(), x_sampled_, batch.num_sample_rows);
  linear(member, model_.lm_head(), normed_, logits_, config_.vocab_size, batch.num_sample_rows);
}

void Decoder::attention_block(TeamMember& member, const ForwardBatch& batch, size_t index) {
  const LayerWeights& layer = model_.layers()[index];
  norm(member, *layer.input_norm, x_, batch.num_tokens);
  linear(member, *layer.qkv, normed_, qkv_, config_.qkv_size(), batch.num_tokens);
  RopeKvWriteParams rope;
  rope.qkv = qkv_;
  rope.positions = batch.positions;
  rope.slot_mapping = batch.slot_mapping;
  rope.cos = rope_cos_;
  rope.sin = rope_sin_;
  rope.norm_eps = config_.rms_norm_eps;
  rope.q = q_;
  rope.kv = kv_[index];
  rope.num_tokens = batch.num_tokens;
  rope.num_heads = config_.num_heads;
  exec_.rope_kv_write(member, layer.q_norm.get(), layer.k_norm.get(), rope);

  const bool last = index + 1 == model_.layers().size();
  const int32_t num_rows = last ? batch.num_sample_rows : batch.num_tokens;
  if (num_rows == 0) return;
  AttentionParams attention;
  attention.q = q_;
  attention.kv = kv_[index];
  attention.block_tables = batch.block_tables;
  attention.block_table_stride = batch.block_table_stride;
  attention.items = last ? batch.sample_items : batch.items;
  attention.num_items = last ? batch.num_sample_items : batch.num_items;
  attention.out = attended_;
  attention.out_dtype = dtype_;
  attention.num_heads = config_.num_heads;
  attention.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  exec_.attention(member, attention);

  float* x = x_;
  if (last) {
    exec_.gather_rows(member, x_, batch.sample_rows, x_sampled_, num_rows, config_.hidden_size);
    x = x_sampled_;
  }
  linear(member, *layer.o, attended_, x, config_.hidden_size, num_rows, Epilogue::kAdd);
  exec_.all_reduce(member, x, int64_t{num_rows} * config_.hidden_size);
}

void Decoder::mlp_block(TeamMember& member, const LayerWeights& layer, float* x, int32_t num_rows) {
  norm(member, *layer.post_attention_norm, x, num_rows);
  linear(member, *layer.gate_up, normed_, inner_, config_.intermediate_size, num_rows, Epilogue::kSiluMul);
  linear(member, *layer.down, inner_, x, config_.hidden_size, num_rows, Epilogue::kAdd);
  exec_.all_reduce(member, x, int64_t{num_rows} * config_.hidden_size);
}

void Decoder::norm(TeamMember& member, const Weight& weight, float* x, int32_t num_rows) {
  RmsNormParams params;
  params.x = x;
  params.out = normed_;
  params.out_dtype = dtype_;
  params.num_rows = num_rows;
  params.size = config_.hidden_size;
  params.eps = config_.rms_norm_eps;
  exec_.rms_norm(member, weight, params);
}

void Decoder::linear(TeamMember& member, const Weight& weight, const void* a, void* out, int64_t out_stride,
                     int32_t num_rows, Epilogue epilogue) {
  exec_.linear(member, weight, {a, out, out_stride, dtype_, num_rows, epilogue});
}

}  // namespace steploop
