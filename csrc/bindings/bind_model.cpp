// ModelConfig and Model.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "core/errors.h"
#include "kernels/cpu/packed_linear.h"
#include "model/model.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace steploop {

namespace {

// Reads a torch tensor by its Python attributes: no torch header is needed.
TensorView view_of(const std::string& name, const py::object& tensor, Device model_device) {
  if (!py::hasattr(tensor, "data_ptr")) throw ModelLoadError(concat(name, " is not a torch.Tensor"));
  const std::string device = py::cast<std::string>(tensor.attr("device").attr("type"));
  const bool on_model_device =
      device == "cuda" && model_device == Device::kCuda && py::cast<int>(tensor.attr("device").attr("index")) == 0;
  if (device != "cpu" && !on_model_device)
    throw ModelLoadError(concat(name, " must be on the CPU or on the model's device, got ",
                                py::cast<std::string>(py::str(tensor.attr("device")))));
  if (py::str(tensor.attr("layout")).cast<std::string>() != "torch.strided" || tensor.attr("is_neg")().cast<bool>())
    throw ModelLoadError(concat(name, " must be an ordinary strided tensor"));
  TensorView view;
  view.on_device = device != "cpu";
  const auto shape = py::cast<std::vector<int64_t>>(tensor.attr("shape"));
  const auto strides = py::cast<std::vector<int64_t>>(tensor.attr("stride")());
  if (shape.size() > TensorView::kMaxDims)
    throw ModelLoadError(concat(name, " must have at most ", TensorView::kMaxDims, " dimensions, got ", shape.size()));
  const std::string dtype = py::cast<std::string>(py::str(tensor.attr("dtype")));  // "torch.float32"
  if (dtype == "torch.float32")
    view.dtype = DType::kFloat32;
  else if (dtype == "torch.bfloat16")
    view.dtype = DType::kBFloat16;
  else if (dtype == "torch.float16")
    view.dtype = DType::kFloat16;
  else
    throw ModelLoadError(concat(name, " must be float32, bfloat16 or float16, got ", dtype));
  view.data = reinterpret_cast<const void*>(py::cast<uintptr_t>(tensor.attr("data_ptr")()));
  if (view.data == nullptr && tensor.attr("numel")().cast<int64_t>() > 0)
    throw ModelLoadError(concat(name, " has no data"));
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

// The data of a contiguous CPU tensor of this dtype and shape.
const void* data_of(const std::string& name, const py::object& tensor, const char* dtype,
                    const std::vector<int64_t>& shape) {
  if (!py::hasattr(tensor, "data_ptr")) throw ModelLoadError(concat(name, " is not a torch.Tensor"));
  const std::string found = py::cast<std::string>(py::str(tensor.attr("dtype")));
  if (found != concat("torch.", dtype)) throw ModelLoadError(concat(name, " must be ", dtype, ", got ", found));
  if (py::cast<std::string>(tensor.attr("device").attr("type")) != "cpu" ||
      !tensor.attr("is_contiguous")().cast<bool>())
    throw ModelLoadError(concat(name, " must be contiguous and on the CPU"));
  if (py::cast<std::vector<int64_t>>(tensor.attr("shape")) != shape)
    throw ModelLoadError(concat(name, " has shape ", py::cast<std::string>(py::str(tensor.attr("shape"))),
                                ", which does not fit its codes"));
  return reinterpret_cast<const void*>(py::cast<uintptr_t>(tensor.attr("data_ptr")()));
}

QuantizedTensor quantized_view_of(const std::string& name, const py::object& codes, const py::object& scales,
                                  const py::object& minimums) {
  if (!py::hasattr(codes, "shape")) throw ModelLoadError(concat(name, " is not a torch.Tensor"));
  const auto shape = py::cast<std::vector<int64_t>>(codes.attr("shape"));
  if (shape.size() != 2) throw ModelLoadError(concat(name, " must have 2 dimensions, got ", shape.size()));
  QuantizedTensor view;
  view.rows = shape[0];
  view.columns = shape[1];
  view.quantization = minimums.is_none() ? Quantization::kInt8 : Quantization::kInt4;
  if (minimums.is_none()) {
    view.codes = static_cast<const uint8_t*>(data_of(name, codes, "int8", shape));
    const std::vector<int64_t> groups{shape[0], ceil_div(shape[1], quantized_input_group(view.quantization, shape[1]))};
    view.scales = static_cast<const float*>(data_of(name + " scales", scales, "float32", groups));
  } else {
    const std::vector<int64_t> groups{shape[0], shape[1] / kInt4Group};
    if (shape[1] % kInt4Group)
      throw ModelLoadError(concat(name, " must have a multiple of ", kInt4Group, " columns for int4, got ", shape[1]));
    view.codes = static_cast<const uint8_t*>(data_of(name, codes, "uint8", shape));
    view.group_scales = static_cast<const uint16_t*>(data_of(name + " scales", scales, "float16", groups));
    view.group_minimums = static_cast<const uint16_t*>(data_of(name + " minimums", minimums, "float16", groups));
  }
  return view;
}

// "int8" and so on by kind of weight, for the kinds that are quantised, and which of them are rotated.
LinearFormats linear_formats(const std::map<std::string, std::string>& quantization,
                             const std::set<std::string>& rotated) {
  LinearFormats formats;
  const auto format_of = [&formats](const std::string& kind) -> LinearFormat& {
    for (const auto& [name, format] : LinearFormats::kKinds)
      if (kind == name) return formats.*format;
    throw InvalidArgumentError(concat("a linear weight is one of qkv, o, gate_up, down or lm_head, got ", kind));
  };
  for (const auto& [kind, name] : quantization) format_of(kind).quantization = quantization_from_name(name.c_str());
  for (const std::string& kind : rotated) format_of(kind).rotated = true;
  return formats;
}

void bind_config(py::module_& m) {
  const ModelConfig defaults;
  py::class_<ModelConfig>(m, "ModelConfig", "The shape of a decoder-only transformer. Sizes are in elements.")
      .def(
          py::init([](int32_t vocab_size, int32_t hidden_size, int32_t intermediate_size, int32_t num_layers,
                      int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, float rms_norm_eps,
                      int32_t max_position_embeddings, double rope_theta, const std::string& rope_scaling,
                      double rope_factor, double rope_low_freq_factor, double rope_high_freq_factor,
                      int32_t rope_original_max_position_embeddings, bool qkv_bias, bool o_bias, bool mlp_bias,
                      bool qk_norm, bool tie_word_embeddings, const std::map<std::string, std::string>& quantization,
                      const std::set<std::string>& rotated) {
            ModelConfig config{vocab_size,
                               hidden_size,
                               intermediate_size,
                               num_layers,
                               num_heads,
                               num_kv_heads,
                               head_dim,
                               rms_norm_eps,
                               max_position_embeddings,
                               rope_theta,
                               rope_scaling_from_name(rope_scaling.c_str()),
                               rope_factor,
                               rope_low_freq_factor,
                               rope_high_freq_factor,
                               rope_original_max_position_embeddings,
                               qkv_bias,
                               o_bias,
                               mlp_bias,
                               qk_norm,
                               tie_word_embeddings,
                               linear_formats(quantization, rotated)};
            config.validate();
            return config;
          }),
          py::kw_only(), "vocab_size"_a, "hidden_size"_a, "intermediate_size"_a, "num_layers"_a, "num_heads"_a,
          "num_kv_heads"_a, "head_dim"_a, "rms_norm_eps"_a, "max_position_embeddings"_a, "rope_theta"_a,
          "rope_scaling"_a = "default", "rope_factor"_a = defaults.rope_factor,
          "rope_low_freq_factor"_a = defaults.rope_low_freq_factor,
          "rope_high_freq_factor"_a = defaults.rope_high_freq_factor, "rope_original_max_position_embeddings"_a = 0,
          "qkv_bias"_a = false, "o_bias"_a = false, "mlp_bias"_a = false, "qk_norm"_a = false,
          "tie_word_embeddings"_a = false, "quantization"_a = std::map<std::string, std::string>{},
          "rotated"_a = std::set<std::string>{},
          "Raises UnsupportedModelError for a shape that cannot run. rope_scaling: default, linear or llama3. "
          "quantization: int8 or int4 for each of qkv, o, gate_up, down and lm_head that is stored so. rotated: those of "
          "them whose columns are rotated (see steploop.weights.quantize.rotate). A quantised lm_head is loaded "
          "as lm_head.codes, beside the rows it was made of (lm_head.weight, or the embeddings if tied), from which the "
          "best logits are computed again.")
      .def_readonly("vocab_size", &ModelConfig::vocab_size)
      .def_readonly("hidden_size", &ModelConfig::hidden_size)
      .def_readonly("intermediate_size", &ModelConfig::intermediate_size)
      .def_readonly("num_layers", &ModelConfig::num_layers)
      .def_readonly("num_heads", &ModelConfig::num_heads)
      .def_readonly("num_kv_heads", &ModelConfig::num_kv_heads)
      .def_readonly("head_dim", &ModelConfig::head_dim)
      .def_readonly("rms_norm_eps", &ModelConfig::rms_norm_eps)
      .def_readonly("max_position_embeddings", &ModelConfig::max_position_embeddings)
      .def_readonly("rope_theta", &ModelConfig::rope_theta)
      .def_property_readonly("rope_scaling", [](const ModelConfig& c) { return rope_scaling_name(c.rope_scaling); })
      .def_readonly("rope_factor", &ModelConfig::rope_factor)
      .def_readonly("rope_low_freq_factor", &ModelConfig::rope_low_freq_factor)
      .def_readonly("rope_high_freq_factor", &ModelConfig::rope_high_freq_factor)
      .def_readonly("rope_original_max_position_embeddings", &ModelConfig::rope_original_max_position_embeddings)
      .def_readonly("qkv_bias", &ModelConfig::qkv_bias)
      .def_readonly("o_bias", &ModelConfig::o_bias)
      .def_readonly("mlp_bias", &ModelConfig::mlp_bias)
      .def_readonly("qk_norm", &ModelConfig::qk_norm)
      .def_readonly("tie_word_embeddings", &ModelConfig::tie_word_embeddings);
}

// What a memoryview of a PackedArray holds on to.
struct HeldArray {
  std::shared_ptr<Model> model;
  void* data;
  size_t size_bytes;
};

py::buffer_info buffer_of(const HeldArray& array) {
  return {static_cast<uint8_t*>(array.data), static_cast<py::ssize_t>(array.size_bytes), array.model->finished()};
}

std::map<std::string, py::memoryview> arrays_of(const std::shared_ptr<Model>& model) {
  std::map<std::string, py::memoryview> arrays;
  for (const PackedArray& array : model->packed_arrays())
    arrays.emplace(array.name, py::memoryview(py::cast(HeldArray{model, array.data, array.size_bytes})));
  return arrays;
}

}  // namespace

void bind_model(py::module_& m) {
  bind_config(m);
  m.attr("PACKED_LAYOUT_VERSION") = kPackedLayoutVersion;
  py::class_<HeldArray>(m, "_PackedArray", py::buffer_protocol()).def_buffer(&buffer_of);
  py::class_<Model, std::shared_ptr<Model>>(m, "Model", "A model's weights, packed for a device.")
      .def(
          py::init([](const ModelConfig& config, const std::string& dtype, const std::string& device) {
            return std::make_shared<Model>(config, dtype_from_name(dtype.c_str()), device_from_name(device.c_str()));
          }),
          "config"_a, py::kw_only(), "dtype"_a, "device"_a = "cpu",
          "Takes the memory of all weights. dtype: float32 or bfloat16 on the CPU, bfloat16 or float16 on CUDA. Raises "
          "UnsupportedDeviceError.")
      .def("expected_weights", &Model::expected_weights, "Checkpoint names and the shape of each.")
      .def(
          "check_weights", &Model::check_weights, "shapes"_a,
          "Raises ModelLoadError naming every missing, unexpected and mis-shaped one of a checkpoint's weights, of which "
          "only names and shapes are needed.")
      .def(
          "load_weight",
          [](Model& model, const std::string& name, const py::object& tensor) {
            const TensorView view = view_of(name, tensor, model.device());
            const py::gil_scoped_release release;
            model.load_weight(name, view);
          },
          "name"_a, "tensor"_a,
          "Copies a contiguous float32, bfloat16 or float16 CPU torch.Tensor to its place; on CUDA also a tensor of that "
          "device. A name or shape that does not fit is reported by finish_loading.")
      .def(
          "load_quantized_weight",
          [](Model& model, const std::string& name, const py::object& codes, const py::object& scales,
             const py::object& minimums) {
            const QuantizedTensor view = quantized_view_of(name, codes, scales, minimums);
            const py::gil_scoped_release release;
            model.load_quantized_weight(name, view);
          },
          "name"_a, "codes"_a, "scales"_a, "minimums"_a = py::none(),
          "Copies a weight [out, in] that the configuration says is quantised. int8: codes int8, scales float32 [out, "
          "ceil(in / 64)]; value = scale * code. int4: codes uint8 of 0..15, scales and minimums float16 [out, in / 32]; value = scale "
          "* code + minimum. Contiguous CPU tensors. Raises ModelLoadError for others.")
      .def("finish_loading", &Model::finish_loading,
           "Raises ModelLoadError naming every missing, unexpected, repeated and mis-shaped tensor.")
      .def(
          "packed_arrays", &arrays_of,
          "All memory of the weights, by name, as bytes: to save a finished model's, which can only be read, or to fill "
          "another's with just that (of the same configuration, dtype and PACKED_LAYOUT_VERSION). Raises "
          "UnsupportedDeviceError on CUDA.")
      .def("finish_packed_loading", &Model::finish_packed_loading,
           "Instead of finish_loading, once packed_arrays have been filled. Raises ModelLoadError where tensors were "
           "loaded, too.")
      .def_property_readonly("weight_bytes", &Model::weight_bytes)
      .def_property_readonly("config", &Model::config)
      .def_property_readonly("dtype", [](const Model& model) { return dtype_name(model.dtype()); })
      .def_property_readonly("device",
                             [](const Model& model) { return model.device() == Device::kCuda ? "cuda" : "cpu"; });
}

}  // namespace steploop
