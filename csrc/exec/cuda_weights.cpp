// Loading of CUDA weights from checkpoint tensors, on the host or already on the device.
#include "exec/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "kernels/cuda/kernels.h"

namespace steploop {

namespace {

constexpr int64_t kChunkBytes = 32 << 20;  // of host memory, while a tensor is converted

const LinearSpec& validated(const LinearSpec& spec) {
  SL_CHECK(spec.dtype != DType::kFloat32);
  if (spec.in_features % 8 != 0)
    throw UnsupportedModelError(
        concat("device cuda: rows of a weight must be a multiple of 8 elements, got ", spec.in_features));
  return spec;
}

// Elements [begin, begin + count) of a host tensor as `dtype`.
void convert(const TensorView& tensor, int64_t begin, int64_t count, DType dtype, void* out) {
  if (tensor.dtype == dtype) {
    const size_t size = dtype_size(dtype);
    std::memcpy(out, static_cast<const char*>(tensor.data) + static_cast<size_t>(begin) * size,
                static_cast<size_t>(count) * size);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float value = tensor.element(begin + i);
    switch (dtype) {
      case DType::kFloat32: static_cast<float*>(out)[i] = value; break;
      case DType::kBFloat16: static_cast<bf16*>(out)[i] = float_to_bf16(value); break;
      case DType::kFloat16: static_cast<uint16_t*>(out)[i] = float_to_fp16(value); break;
      case DType::kInt8: SL_CHECK(false, "no weight is int8"); break;
    }
  }
}

// Calls copy(pointer, first_row, num_rows) until all rows of `tensor` are through, as `dtype`.
template <class Copy>
void for_each_chunk(const TensorView& tensor, int64_t num_rows, int64_t row_size, DType dtype, const Copy& copy) {
  if (tensor.on_device) {
    // Whatever streams its owner uses, before and after.
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (tensor.dtype == dtype) {
      copy(tensor.data, int64_t{0}, num_rows);
      check_cuda(cudaDeviceSynchronize(), "copying a weight");
      return;
    }
    std::vector<char> on_host(static_cast<size_t>(num_rows * row_size) * dtype_size(tensor.dtype));
    check_cuda(cudaMemcpy(on_host.data(), tensor.data, on_host.size(), cudaMemcpyDefault), "copying a weight");
    TensorView view = tensor;
    view.data = on_host.data();
    view.on_device = false;
    for_each_chunk(view, num_rows, row_size, dtype, copy);
    return;
  }
  const auto row_bytes = row_size * static_cast<int64_t>(dtype_size(dtype));
  const int64_t chunk = std::min(num_rows, std::max<int64_t>(1, kChunkBytes / row_bytes / 8) * 8);
  std::vector<char> converted(static_cast<size_t>(chunk * row_bytes));
  for (int64_t row = 0; row < num_rows; row += chunk) {
    const int64_t rows = std::min(chunk, num_rows - row);
    convert(tensor, row * row_size, rows * row_size, dtype, converted.data());
    copy(converted.data(), row, rows);
  }
}

}  // namespace

CudaMatrixWeight::CudaMatrixWeight(const LinearSpec& spec)
    : spec_(validated(spec)),
      data_(static_cast<size_t>(spec.out_features * spec.in_features) * dtype_size(spec.dtype), MemoryUse::kWeights),
      bias_(spec.bias ? static_cast<size_t>(spec.out_features) * sizeof(float) : 0, MemoryUse::kWeights) {
  if (spec.bias) check_cuda(cudaMemset(bias_.as<void>(), 0, bias_.size()), "cudaMemset");
}

void CudaMatrixWeight::load(const TensorView& tensor, WeightPart part) {
  const int64_t num_rows = tensor.shape[0];
  const bool halves = part.half != WeightPart::Half::kNone;
  SL_CHECK((tensor.ndim == (part.bias ? 1 : 2)) && (part.bias || tensor.shape[1] == spec_.in_features) &&
           part.first_row + num_rows * (halves ? 2 : 1) <= spec_.out_features);
  SL_CHECK(!halves || num_rows % cuda::kGateUpGroup == 0);
  const CudaDeviceGuard guard;
  const DType dtype = part.bias ? DType::kFloat32 : spec_.dtype;
  const int64_t row_size = part.bias ? 1 : spec_.in_features;
  const size_t row_bytes = static_cast<size_t>(row_size) * dtype_size(dtype);
  void* destination = (part.bias ? bias_ : data_).as<char>() + static_cast<size_t>(part.first_row) * row_bytes;
  for_each_chunk(tensor, num_rows, row_size, dtype, [&](const void* rows, int64_t first_row, int64_t count) {
    copy_rows(rows, first_row, count, row_bytes, destination, part.half);
  });
}

// Rows of gate and up alternate in groups: see cuda::kGateUpGroup.
void CudaMatrixWeight::copy_rows(const void* rows, int64_t first_row, int64_t num_rows, size_t row_bytes,
                                 void* destination, WeightPart::Half half) const {
  char* out = static_cast<char*>(destination);
  if (half == WeightPart::Half::kNone) {
    check_cuda(cudaMemcpy(out + static_cast<size_t>(first_row) * row_bytes, rows,
                          static_cast<size_t>(num_rows) * row_bytes, cudaMemcpyDefault),
               "copying a weight");
    return;
  }
  const size_t group_bytes = cuda::kGateUpGroup * row_bytes;
  out += static_cast<size_t>(first_row) * 2 * row_bytes + (half == WeightPart::Half::kUp ? group_bytes : 0);
  check_cuda(cudaMemcpy2D(out, 2 * group_bytes, rows, group_bytes, group_bytes,
                          static_cast<size_t>(num_rows / cuda::kGateUpGroup), cudaMemcpyDefault),
             "copying a weight");
}

CudaVectorWeight::CudaVectorWeight(int64_t size)
    : data_(static_cast<size_t>(size) * sizeof(float), MemoryUse::kWeights) {}

void CudaVectorWeight::load(const TensorView& tensor, WeightPart) {
  SL_CHECK(tensor.ndim == 1 && static_cast<size_t>(tensor.shape[0]) * sizeof(float) == data_.size());
  const CudaDeviceGuard guard;
  for_each_chunk(tensor, tensor.shape[0], 1, DType::kFloat32, [&](const void* values, int64_t first, int64_t count) {
    check_cuda(
        cudaMemcpy(data_.as<float>() + first, values, static_cast<size_t>(count) * sizeof(float), cudaMemcpyDefault),
        "copying a weight");
  });
}

}  // namespace steploop
