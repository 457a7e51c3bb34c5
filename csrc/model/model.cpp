// Model: allocation of weights from the configuration, the name table, loading.
#include "model/model.h"

#include "core/check.h"

namespace steploop {

namespace {

std::string shape_string(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

constexpr const char* kLmHeadCodes = "lm_head.codes";  // of a quantised output layer

std::string wrong_shape(const std::string& name, const std::vector<int64_t>& expected,
                        const std::vector<int64_t>& got) {
  return concat("wrong shape of ", name, ": expected ", shape_string(expected), ", got ", shape_string(got));
}

void throw_problems(const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  std::string text = concat("the checkpoint does not fit the model (", problems.size(), " problems): ");
  for (size_t i = 0; i < problems.size(); ++i) text += (i ? "; " : "") + problems[i];
  throw ModelLoadError(text);
}

}  // namespace

Model::Model(const ModelConfig& config, DType dtype, Device device) : config_(config), dtype_(dtype), device_(device) {
  config_.validate();
  if (device == Device::kCpu && dtype == DType::kFloat16)
    throw UnsupportedDeviceError("device cpu computes in float32 or bfloat16, got dtype float16");
  if (device == Device::kCuda && dtype == DType::kFloat32)
    throw UnsupportedDeviceError("device cuda computes in bfloat16 or float16, got dtype float32");
  const int64_t vocab = config_.vocab_size, hidden = config_.hidden_size;
  lm_head_ = make_linear_weight(device, {vocab, hidden, dtype, false, config_.formats.lm_head, &arena_});
  if (config_.shares_embedding()) {
    add_target("model.embed_tokens.weight", *lm_head_, {vocab, hidden});
  } else {
    embedding_ = make_table_weight(device, vocab, hidden, dtype);
    add_target("model.embed_tokens.weight", *embedding_, {vocab, hidden});
    if (!config_.formats.lm_head.is_quantized()) {
      add_target("lm_head.weight", *lm_head_, {vocab, hidden});
    } else {
      add_target(kLmHeadCodes, *lm_head_, {vocab, hidden});
      if (!config_.tie_word_embeddings) {
        lm_head_rows_ = make_table_weight(device, vocab, hidden, dtype);
        add_target("lm_head.weight", *lm_head_rows_, {vocab, hidden});
      }
    }
  }
  final_norm_ = make_vector_weight(device, hidden);
  add_target("model.norm.weight", *final_norm_, {hidden});
  layers_.resize(static_cast<size_t>(config_.num_layers));
  for (int32_t i = 0; i < config_.num_layers; ++i) add_layer(i);
}

void Model::add_target(const std::string& name, Weight& weight, std::vector<int64_t> shape, WeightPart part) {
  targets_.emplace(name, Target{&weight, part, std::move(shape)});
}

void Model::add_layer(int32_t index) {
  using Half = WeightPart::Half;
  LayerWeights& layer = layers_[static_cast<size_t>(index)];
  const ModelConfig& c = config_;
  const int64_t hidden = c.hidden_size, inner = c.intermediate_size, q = c.q_size(), kv = c.kv_size();
  const std::string prefix = concat("model.layers.", index, ".");
  auto vector = [&](const std::string& name, int64_t size) {
    auto weight = make_vector_weight(device_, size);
    add_target(prefix + name + ".weight", *weight, {size});
    return weight;
  };
  auto linear = [&](int64_t out, int64_t in, bool bias, LinearFormat format) {
    return make_linear_weight(device_, {out, in, dtype_, bias, format, &arena_});
  };
  auto part = [&](const std::string& name, Weight& weight, int64_t rows, int64_t columns, bool bias, WeightPart where) {
    add_target(prefix + name + ".weight", weight, {rows, columns}, where);
    where.bias = true;
    if (bias) add_target(prefix + name + ".bias", weight, {rows}, where);
  };
  layer.input_norm = vector("input_layernorm", hidden);
  layer.post_attention_norm = vector("post_attention_layernorm", hidden);
  if (c.qk_norm) {
    layer.q_norm = vector("self_attn.q_norm", c.head_dim);
    layer.k_norm = vector("self_attn.k_norm", c.head_dim);
  }
  layer.qkv = linear(c.qkv_size(), hidden, c.qkv_bias, c.formats.qkv);
  part("self_attn.q_proj", *layer.qkv, q, hidden, c.qkv_bias, {0});
  part("self_attn.k_proj", *layer.qkv, kv, hidden, c.qkv_bias, {q});
  part("self_attn.v_proj", *layer.qkv, kv, hidden, c.qkv_bias, {q + kv});
  layer.o = linear(hidden, q, c.o_bias, c.formats.o);
  part("self_attn.o_proj", *layer.o, hidden, q, c.o_bias, {});
  layer.gate_up = linear(2 * inner, hidden, c.mlp_bias, c.formats.gate_up);
  part("mlp.gate_proj", *layer.gate_up, inner, hidden, c.mlp_bias, {0, Half::kGate});
  part("mlp.up_proj", *layer.gate_up, inner, hidden, c.mlp_bias, {0, Half::kUp});
  layer.down = linear(hidden, inner, c.mlp_bias, c.formats.down);
  part("mlp.down_proj", *layer.down, hidden, inner, c.mlp_bias, {});
}

int64_t Model::weight_bytes() const {
  int64_t bytes = lm_head_->size_bytes() + final_norm_->size_bytes();
  for (const auto* rows : {&embedding_, &lm_head_rows_})
    if (*rows) bytes += (*rows)->size_bytes();
  for (const LayerWeights& layer : layers_)
    for (const auto* weight : {&layer.input_norm, &layer.qkv, &layer.q_norm, &layer.k_norm, &layer.o,
                               &layer.post_attention_norm, &layer.gate_up, &layer.down})
      if (*weight) bytes += (*weight)->size_bytes();
  return bytes;
}

std::vector<LinearWeights> Model::linear_weights() const {
  const auto format_of = [this](const Weight& weight) {
    const LinearFormat format = weight.format();
    return format.is_quantized() ? quantization_name(format.quantization) : dtype_name(dtype_);
  };
  const auto of_layers = [&](const char* kind, std::unique_ptr<Weight> LayerWeights::* weight) {
    LinearWeights weights{kind, format_of(*(layers_.front().*weight)), 0};
    for (const LayerWeights& layer : layers_) weights.size_bytes += (layer.*weight)->size_bytes();
    return weights;
  };
  return {of_layers("qkv", &LayerWeights::qkv),
          of_layers("o", &LayerWeights::o),
          of_layers("gate_up", &LayerWeights::gate_up),
          of_layers("down", &LayerWeights::down),
          {"lm_head", format_of(*lm_head_), lm_head_->size_bytes()}};
}

std::map<std::string, std::vector<int64_t>> Model::expected_weights() const {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& [name, target] : targets_) shapes.emplace(name, target.shape);
  return shapes;
}

void Model::load_weight(const std::string& name, const TensorView& tensor) {
  const std::vector<int64_t> shape(tensor.shape.begin(), tensor.shape.begin() + tensor.ndim);
  Target* target = take_target(name, shape);
  if (!target) return;
  if (!tensor.is_contiguous()) throw ModelLoadError(concat(name, " must be contiguous"));
  if (quantization_of(*target) != Quantization::kNone)
    throw ModelLoadError(concat(name, " must be ", quantization_name(quantization_of(*target)), " codes, got ",
                                dtype_name(tensor.dtype)));
  target->weight->load(tensor, target->part);
  target->loaded = true;
}

void Model::load_quantized_weight(const std::string& name, const QuantizedTensor& tensor) {
  Target* target = take_target(name, {tensor.rows, tensor.columns});
  if (!target) return;
  if (quantization_of(*target) != tensor.quantization)
    throw ModelLoadError(concat(name, " must be stored as ", quantization_name(quantization_of(*target)), ", got ",
                                quantization_name(tensor.quantization)));
  target->weight->load_quantized(tensor, target->part);
  target->loaded = true;
}

Quantization Model::quantization_of(const Target& target) {
  return target.part.bias ? Quantization::kNone : target.weight->format().quantization;
}

Model::Target* Model::take_target(const std::string& name, const std::vector<int64_t>& shape) {
  if (finished_) throw ModelLoadError(concat(name, " came after finish_loading"));
  const auto found = targets_.find(name);
  if (found == targets_.end()) {
    if (!is_left_out(name)) problems_.push_back("unexpected " + name);
    return nullptr;
  }
  Target& target = found->second;
  if (target.loaded) {
    problems_.push_back("repeated " + name);
    return nullptr;
  }
  if (shape == target.shape) return &target;
  target.loaded = true;  // not missing as well
  problems_.push_back(wrong_shape(name, target.shape, shape));
  return nullptr;
}

// Some checkpoints store the output layer although it is tied to the embedding; none has our codes of it.
bool Model::is_left_out(const std::string& name) const {
  return name == kLmHeadCodes || (config_.tie_word_embeddings && name == "lm_head.weight");
}

void Model::check_weights(const std::map<std::string, std::vector<int64_t>>& shapes) const {
  std::vector<std::string> problems;
  for (const auto& [name, shape] : shapes) {
    const auto found = targets_.find(name);
    if (is_left_out(name)) continue;
    if (found == targets_.end())
      problems.push_back("unexpected " + name);
    else if (found->second.shape != shape)
      problems.push_back(wrong_shape(name, found->second.shape, shape));
  }
  for (const auto& [name, target] : targets_)
    if (!shapes.contains(name) && !is_left_out(name)) problems.push_back("missing " + name);
  throw_problems(problems);
}

void Model::finish_loading() {
  std::vector<std::string> problems = problems_;
  for (const auto& [name, target] : targets_)
    if (!target.loaded) problems.push_back("missing " + name);
  throw_problems(problems);
  finished_ = true;
}

}  // namespace steploop
