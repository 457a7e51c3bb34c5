// A model's weights as named arrays of bytes: what a packed model file holds.
#include <algorithm>

#include "core/errors.h"
#include "model/model.h"

namespace steploop {

std::vector<PackedArray> Model::packed_arrays() const {
  if (device_ != Device::kCpu) throw UnsupportedDeviceError("packed weights are for device cpu; this model is on cuda");
  std::vector<PackedArray> arrays;
  const auto add = [&](const std::string& name, const std::unique_ptr<Weight>& weight) {
    if (!weight) return;
    for (const NamedBuffer& buffer : weight->buffers())
      arrays.push_back({concat(name, ".", buffer.name), buffer.data,
                        static_cast<size_t>(round_up(static_cast<int64_t>(buffer.size_bytes),
                                                     static_cast<int64_t>(kBufferAlignment)))});
  };
  add("embedding", embedding_);
  add("lm_head", lm_head_);
  add("lm_head_rows", lm_head_rows_);
  add("final_norm", final_norm_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerWeights& layer = layers_[i];
    const std::string prefix = concat("layers.", i, ".");
    add(prefix + "input_norm", layer.input_norm);
    add(prefix + "qkv", layer.qkv);
    add(prefix + "q_norm", layer.q_norm);
    add(prefix + "k_norm", layer.k_norm);
    add(prefix + "o", layer.o);
    add(prefix + "post_attention_norm", layer.post_attention_norm);
    add(prefix + "gate_up", layer.gate_up);
    add(prefix + "down", layer.down);
  }
  return arrays;
}

void Model::finish_packed_loading() {
  const auto loaded = [](const auto& target) { return target.second.loaded; };
  if (finished_ || !problems_.empty() || std::any_of(targets_.begin(), targets_.end(), loaded))
    throw ModelLoadError("a model is filled with packed arrays or with tensors, not both");
  finished_ = true;
}

}  // namespace steploop
