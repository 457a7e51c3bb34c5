// SiLU * mul against the same in double, for every way the halves alternate.
#include <cuda_runtime_api.h>

#include <cmath>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

void check_shape(Check& check, DType dtype, int32_t size, int32_t group, size_t num_rows = 2) {
  const std::string name =
      std::string(dtype_name(dtype)) + ", size " + std::to_string(size) + ", group " + std::to_string(group);
  const size_t width = static_cast<size_t>(size), run = static_cast<size_t>(group == 0 ? size : group);
  Exact<float> gate_up = check.floats(num_rows * 2 * width, -6, 6);
  if (size == 8) {  // beside large results the errors of others would not count
    gate_up[0] = -200;  // e^200 is no float32; the result is 0
    gate_up[1] = 200;
  }
  Exact<uint8_t> out(num_rows * width * dtype_size(dtype));
  SiluMulParams params = {gate_up.data(), out.data(), dtype, static_cast<int32_t>(num_rows), size, group};
  check.success(name, silu_mul(params, nullptr));

  std::vector<double> want(num_rows * width);
  for (size_t row = 0; row < num_rows; ++row)
    for (size_t i = 0; i < width; ++i) {
      const float* gate = gate_up.data() + row * 2 * width + i / run * 2 * run + i % run;
      want[row * width + i] = gate[0] / (1 + std::exp(-static_cast<double>(gate[0]))) * gate[run];
    }
  check.close(name, dtype, out.data(), want, dtype == DType::kFloat32 ? 1e-5 : 3e-3);
  if (num_rows == 1) return;

  constexpr size_t kRow = 1;
  const Exact<float> row(std::vector<float>(gate_up.begin() + kRow * 2 * width, gate_up.end()));
  Exact<uint8_t> row_out(width * dtype_size(dtype));
  params.gate_up = row.data();
  params.out = row_out.data();
  params.num_rows = 1;
  check.success(name + ": a row alone", silu_mul(params, nullptr));
  check.equal_bits(name + ": a row alone", row_out.data(), out.data() + kRow * row_out.bytes(), row_out.bytes());
}

int with_shape(int32_t num_rows, int32_t size, int32_t group) {
  SiluMulParams params;
  params.num_rows = num_rows;
  params.size = size;
  params.group = group;
  return silu_mul(params, nullptr);
}

}  // namespace

void check_silu_mul(Check& check) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) check_shape(check, dtype, 64, 8);
  check_shape(check, DType::kBFloat16, 8, 0);
  check_shape(check, DType::kFloat32, 576, 24);  // no power of two
  check_shape(check, DType::kBFloat16, 576, 64);
  check_shape(check, DType::kFloat16, 576, 576);
  check_shape(check, DType::kBFloat16, 2056, 8, 1);  // two blocks a row

  check.success("no rows", with_shape(0, 64, 0));
  check.success("no columns", with_shape(3, 0, 0));
  check.fails("size -8", with_shape(1, -8, 0), cudaErrorInvalidValue);
  check.fails("size 12", with_shape(1, 12, 0), cudaErrorInvalidValue);
  check.fails("group 4", with_shape(1, 64, 4), cudaErrorInvalidValue);
  check.fails("group 48 of 64", with_shape(1, 64, 48), cudaErrorInvalidValue);
  check.fails("group -8", with_shape(1, 64, -8), cudaErrorInvalidValue);
  check.fails("-1 rows", with_shape(-1, 64, 0), cudaErrorInvalidValue);
}
