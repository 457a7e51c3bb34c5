// Decoder: one pass over the layers. Linear layers and norms see packed rows; only attention knows of sequences.
#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace steploop {

namespace {

// Past the last layer's keys and values only the sampled rows matter, unless others are scored.
bool all_rows_matter(const ForwardBatch& batch) { return batch.num_scored_rows > 0; }

}  // namespace

template <class Allocate>
Decoder::Activations Decoder::take_activations(const ModelConfig& config, DType dtype, const Limits& limits,
                                               Allocate allocate) {
  const auto tokens = static_cast<size_t>(limits.max_num_batched_tokens);
  const auto samples = static_cast<size_t>(limits.max_num_sample_rows);
  const auto angles = static_cast<size_t>(limits.max_model_len) * static_cast<size_t>(config.head_dim / 2);
  const size_t element = dtype_size(dtype), hidden = static_cast<size_t>(config.hidden_size);
  const size_t q_size = static_cast<size_t>(config.q_size());
  const auto floats = [&](size_t count) { return static_cast<float*>(allocate(count * sizeof(float))); };
  Activations z;
  z.rope_cos = floats(angles);
  z.rope_sin = floats(angles);
  z.x = floats(tokens * hidden);
  z.x_sampled = floats(samples * hidden);
  z.normed = allocate(tokens * hidden * element);
  z.qkv = floats(tokens * static_cast<size_t>(config.qkv_size()));
  z.q = allocate(tokens * q_size * dtype_size(query_dtype(limits.kv_dtype)));
  z.attended = allocate(tokens * q_size * element);
  z.inner = allocate(tokens * static_cast<size_t>(config.intermediate_size) * element);
  if (config.formats.any_quantized()) {
    const int64_t widest = std::max({config.hidden_size, config.q_size(), config.intermediate_size});
    z.quantized.set_strides(widest);
    z.quantized.codes = static_cast<int8_t*>(allocate(tokens * static_cast<size_t>(z.quantized.stride)));
    z.quantized.groups =
        static_cast<RowGroup*>(allocate(tokens * static_cast<size_t>(z.quantized.groups_stride) * sizeof(RowGroup)));
  }
  z.logits = floats(samples * static_cast<size_t>(config.vocab_size));
  return z;
}

int64_t Decoder::activation_bytes(const ModelConfig& config, DType dtype, const Limits& limits) {
  size_t total = 0;
  take_activations(config, dtype, limits, [&total](size_t size_bytes) -> void* {
    total += size_bytes;
    return nullptr;
  });
  return static_cast<int64_t>(total);
}

Decoder::Decoder(const Model& model, Exec& exec, const Limits& limits)
    : model_(model),
      config_(model.config()),
      exec_(exec),
      dtype_(linear_input_dtype(model.device(), model.dtype())),
      num_blocks_{limits.num_kv_blocks, limits.num_host_blocks} {
  SL_CHECK(model.finished(), "the model is not loaded");
  z_ = take_activations(config_, dtype_, limits, [&exec](size_t size_bytes) { return exec.allocate(size_bytes); });
  make_rope_table(limits.max_model_len);
  for (int32_t i = 0; i < config_.num_layers; ++i) {
    kv_.push_back(exec_.make_kv_layer(limits.kv_dtype, config_.num_kv_heads, config_.head_dim, limits.block_size,
                                      limits.num_kv_blocks));
    host_kv_.push_back(exec_.make_host_kv_layer(kv_.back(), limits.num_host_blocks));
  }
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
  exec_.upload(z_.rope_cos, cosines.data(), count * sizeof(float));
  exec_.upload(z_.rope_sin, sines.data(), count * sizeof(float));
}

void Decoder::transfer(TeamMember& member, std::span<const BlockTransfer> transfers) {
  if (transfers.empty()) return;
  const auto check = [this](int32_t pool, BlockId block) {
    SL_CHECK(pool == kDevicePool || pool == kHostPool, "pool ", pool);
    SL_CHECK(block >= 0 && block < num_blocks_[pool], "block ", block, " of ", num_blocks_[pool], " in pool ", pool);
  };
  for (const BlockTransfer& transfer : transfers) {
    check(transfer.src_pool, transfer.src_block);
    check(transfer.dst_pool, transfer.dst_block);
  }
  exec_.transfer_blocks(member, {{kv_, host_kv_}, transfers});
}

void Decoder::forward(TeamMember& member, const ForwardBatch& batch) {
  exec_.embedding(member, model_.embedding(), {batch.token_ids, z_.x, batch.num_tokens, config_.hidden_size});
  const size_t last = model_.layers().size() - 1;
  for (size_t i = 0; i < last; ++i) {
    attention_block(member, batch, i);
    mlp_block(member, model_.layers()[i], z_.x, batch.num_tokens);
  }
  attention_block(member, batch, last);
  if (all_rows_matter(batch)) {
    mlp_block(member, model_.layers()[last], z_.x, batch.num_tokens);
    member.barrier();  // what follows gathers rows that other members have made
  } else if (batch.num_sample_rows > 0) {
    mlp_block(member, model_.layers()[last], z_.x_sampled, batch.num_sample_rows);
  }
}

void Decoder::scored_logits(TeamMember& member, const ForwardBatch& batch, int32_t first, int32_t count) {
  exec_.gather_rows(member, z_.x, batch.scored_rows + first, z_.x_sampled, count, config_.hidden_size);
  output_layer(member, count);
}

void Decoder::sample_logits(TeamMember& member, const ForwardBatch& batch) {
  if (all_rows_matter(batch))
    exec_.gather_rows(member, z_.x, batch.sample_rows, z_.x_sampled, batch.num_sample_rows, config_.hidden_size);
  output_layer(member, batch.num_sample_rows);
}

void Decoder::output_layer(TeamMember& member, int32_t num_rows) {
  const Weight& head = model_.lm_head();
  const int32_t hidden = config_.hidden_size, vocab = config_.vocab_size;
  norm(member, model_.final_norm(), z_.x_sampled, num_rows, {});
  quantize(member, head, z_.normed, hidden, num_rows);
  linear(member, head, z_.normed, hidden, z_.logits, vocab, num_rows);
  if (head.format().is_quantized())
    exec_.rescore(member, model_.lm_head_rows(), {z_.normed, dtype_, z_.logits, num_rows, vocab, hidden});
}

void Decoder::attention_block(TeamMember& member, const ForwardBatch& batch, size_t index) {
  const LayerWeights& layer = model_.layers()[index];
  norm(member, *layer.input_norm, z_.x, batch.num_tokens, quantized_input(*layer.qkv, config_.hidden_size));
  linear(member, *layer.qkv, z_.normed, config_.hidden_size, z_.qkv, config_.qkv_size(), batch.num_tokens);
  RopeKvWriteParams rope;
  rope.qkv = z_.qkv;
  rope.positions = batch.positions;
  rope.slot_mapping = batch.slot_mapping;
  rope.cos = z_.rope_cos;
  rope.sin = z_.rope_sin;
  rope.norm_eps = config_.rms_norm_eps;
  rope.q = z_.q;
  rope.kv = kv_[index];
  rope.num_tokens = batch.num_tokens;
  rope.num_heads = config_.num_heads;
  exec_.rope_kv_write(member, layer.q_norm.get(), layer.k_norm.get(), rope);

  const bool sampled_only = index + 1 == model_.layers().size() && !all_rows_matter(batch);
  const int32_t num_rows = sampled_only ? batch.num_sample_rows : batch.num_tokens;
  if (num_rows == 0) return;
  AttentionParams attention;
  attention.q = z_.q;
  attention.kv = kv_[index];
  attention.block_tables = batch.block_tables;
  attention.block_table_stride = batch.block_table_stride;
  attention.work = sampled_only ? batch.sample_attention : batch.attention;
  attention.out = z_.attended;
  attention.out_dtype = dtype_;
  attention.num_heads = config_.num_heads;
  attention.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  exec_.attention(member, attention);

  float* x = z_.x;
  if (sampled_only) {
    exec_.gather_rows(member, z_.x, batch.sample_rows, z_.x_sampled, num_rows, config_.hidden_size);
    x = z_.x_sampled;
  }
  quantize(member, *layer.o, z_.attended, config_.q_size(), num_rows);
  linear(member, *layer.o, z_.attended, config_.q_size(), x, config_.hidden_size, num_rows, Epilogue::kAdd);
  exec_.all_reduce(member, x, int64_t{num_rows} * config_.hidden_size);
}

void Decoder::mlp_block(TeamMember& member, const LayerWeights& layer, float* x, int32_t num_rows) {
  const int32_t hidden = config_.hidden_size, inner = config_.intermediate_size;
  norm(member, *layer.post_attention_norm, x, num_rows, quantized_input(*layer.gate_up, hidden));
  linear(member, *layer.gate_up, z_.normed, hidden, z_.inner, inner, num_rows, Epilogue::kSiluMul);
  quantize(member, *layer.down, z_.inner, inner, num_rows);
  linear(member, *layer.down, z_.inner, inner, x, hidden, num_rows, Epilogue::kAdd);
  exec_.all_reduce(member, x, int64_t{num_rows} * hidden);
}

void Decoder::norm(TeamMember& member, const Weight& weight, float* x, int32_t num_rows, const QuantizedRows& out) {
  RmsNormParams params;
  params.x = x;
  params.out = z_.normed;
  params.out_dtype = dtype_;
  params.quantized = out;
  params.num_rows = num_rows;
  params.size = config_.hidden_size;
  params.eps = config_.rms_norm_eps;
  exec_.rms_norm(member, weight, params);
}

void Decoder::quantize(TeamMember& member, const Weight& weight, const void* a, int32_t size, int32_t num_rows) {
  if (weight.format().is_quantized())
    exec_.quantize_rows(member, {a, dtype_, quantized_input(weight, size), num_rows, size});
}

void Decoder::linear(TeamMember& member, const Weight& weight, const void* a, int32_t size, void* out,
                     int64_t out_stride, int32_t num_rows, Epilogue epilogue) {
  exec_.linear(member, weight, {a, out, out_stride, dtype_, num_rows, epilogue, quantized_input(weight, size)});
}

QuantizedRows Decoder::quantized_input(const Weight& weight, int32_t size) const {
  if (!weight.format().is_quantized()) return {};
  QuantizedRows rows = z_.quantized;
  rows.set_format(weight.format(), size);
  return rows;
}

}  // namespace steploop
