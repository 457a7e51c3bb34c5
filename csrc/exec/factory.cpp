// From a device to its backend.
#include <cstring>

#include "core/check.h"
#include "core/errors.h"
#include "exec/cpu_exec.h"
#include "exec/cuda_backend.h"

namespace steploop {

Device device_from_name(const char* name) {
  if (std::strcmp(name, "cpu") == 0) return Device::kCpu;
  if (std::strcmp(name, "cuda") == 0) return Device::kCuda;
  throw UnsupportedDeviceError(concat("device must be cpu or cuda, got ", name));
}

DType linear_input_dtype(Device device, DType dtype) {
  const bool widened = device == Device::kCpu && dtype == DType::kBFloat16 && !select_cpu_kernels().bfloat16_inputs;
  return widened ? DType::kFloat32 : dtype;
}

void Weight::load_quantized(const QuantizedTensor&, WeightPart) { SL_CHECK(false, "this weight is not quantised"); }

std::unique_ptr<Weight> make_linear_weight(Device device, const LinearSpec& spec) {
  if (device == Device::kCpu) return make_cpu_linear_weight(spec);
  if (spec.format.is_quantized())
    throw UnsupportedDeviceError(
        concat("quantization must be none on device cuda, got ", quantization_name(spec.format.quantization)));
  return cuda_backend().make_linear_weight(spec);
}

std::unique_ptr<Weight> make_table_weight(Device device, int64_t num_rows, int64_t size, DType dtype) {
  return device == Device::kCuda ? cuda_backend().make_table_weight(num_rows, size, dtype)
                                 : make_cpu_table_weight(num_rows, size, dtype);
}

std::unique_ptr<Weight> make_vector_weight(Device device, int64_t size) {
  return device == Device::kCuda ? cuda_backend().make_vector_weight(size) : make_cpu_vector_weight(size);
}

std::unique_ptr<Exec> make_exec(Device device, const ExecOptions& options) {
  if (device == Device::kCuda) return cuda_backend().make_exec(options);
  return std::make_unique<CpuExec>(options);
}

}  // namespace steploop
