// RMSNorm against the same in double; the sum with a residual exactly; a row alone gives the bits it gives in a batch.
#include <cuda_runtime_api.h>

#include <cmath>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

constexpr float kEps = 0.05f;  // large enough to be missed

std::vector<double> reference(const std::vector<float>& x, const Exact<float>& weight) {
  const size_t size = weight.size();
  std::vector<double> out(x.size());
  for (size_t row = 0; row < x.size() / size; ++row) {
    double squares = 0;
    for (size_t i = 0; i < size; ++i) squares += static_cast<double>(x[row * size + i]) * x[row * size + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + kEps);
    for (size_t i = 0; i < size; ++i) out[row * size + i] = x[row * size + i] * scale * weight[i];
  }
  return out;
}

void check_size(Check& check, DType dtype, int32_t size, bool with_residual, size_t num_rows = 2) {
  const std::string name =
      std::string(dtype_name(dtype)) + ", size " + std::to_string(size) + (with_residual ? ", residual" : "");
  const size_t width = static_cast<size_t>(size);
  const Exact<float> before = check.floats(num_rows * width), residual = check.floats(num_rows * width);
  const Exact<float> weight = check.floats(width, 0.5f, 1.5f);
  Exact<float> x = before;
  Exact<uint8_t> out(num_rows * width * dtype_size(dtype));
  RmsNormParams params;
  params.x = x.data();
  params.residual = with_residual ? residual.data() : nullptr;
  params.weight = weight.data();
  params.out = out.data();
  params.out_dtype = dtype;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.size = size;
  params.eps = kEps;
  check.success(name, rms_norm(params, nullptr));

  std::vector<float> sums(before.begin(), before.end());
  for (size_t i = 0; with_residual && i < sums.size(); ++i) sums[i] += residual[i];
  check.equal_bits(name + ": x", x.data(), sums.data(), x.bytes());
  check.close(name, dtype, out.data(), reference(sums, weight), dtype == DType::kFloat32 ? 1e-5 : 3e-3);

  if (num_rows == 1) return;
  constexpr size_t kRow = 1;
  Exact<float> row(std::vector<float>(before.begin() + kRow * width, before.end()));
  const Exact<float> row_residual(std::vector<float>(residual.begin() + kRow * width, residual.end()));
  Exact<uint8_t> row_out(width * dtype_size(dtype));
  params.x = row.data();
  params.residual = with_residual ? row_residual.data() : nullptr;
  params.out = row_out.data();
  params.num_rows = 1;
  check.success(name + ": a row alone", rms_norm(params, nullptr));
  check.equal_bits(name + ": a row alone", row_out.data(), out.data() + kRow * row_out.bytes(), row_out.bytes());
}

int with_shape(int32_t num_rows, int32_t size, DType out_dtype) {
  RmsNormParams params;
  params.num_rows = num_rows;
  params.size = size;
  params.out_dtype = out_dtype;
  return rms_norm(params, nullptr);
}

}  // namespace

void check_rms_norm(Check& check) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    check_size(check, dtype, 8, true);
    check_size(check, dtype, 64, dtype == DType::kFloat16);
    check_size(check, dtype, 576, dtype != DType::kFloat16);
  }
  // Each of the larger blocks.
  check_size(check, DType::kFloat16, 1032, true);
  check_size(check, DType::kBFloat16, 4096, true, 1);
  check_size(check, DType::kFloat32, 4100, false, 1);
  check_size(check, DType::kBFloat16, 8200, true, 1);

  check.success("no rows", with_shape(0, 64, DType::kBFloat16));
  check.fails("size 6", with_shape(1, 6, DType::kFloat32), cudaErrorInvalidValue);
  check.fails("size 12 in 16 bits", with_shape(1, 12, DType::kBFloat16), cudaErrorInvalidValue);
  check.fails("size 16392", with_shape(1, 16392, DType::kBFloat16), cudaErrorInvalidValue);
  check.fails("size 0", with_shape(1, 0, DType::kFloat32), cudaErrorInvalidValue);
  check.fails("-1 rows", with_shape(-1, 64, DType::kFloat32), cudaErrorInvalidValue);
}
