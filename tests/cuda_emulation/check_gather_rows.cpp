// Gathering of float32 rows: exact.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

void check_size(Check& check, int32_t size, const std::vector<int32_t>& indices) {
  const std::string name = "size " + std::to_string(size);
  const size_t width = static_cast<size_t>(size);
  const Exact<float> in = check.floats(6 * width);
  const Exact<int32_t> rows(indices);
  Exact<float> out(rows.size() * width), want(rows.size() * width);
  check.success(name,
                gather_rows(in.data(), rows.data(), out.data(), static_cast<int32_t>(rows.size()), size, nullptr));
  for (size_t row = 0; row < rows.size(); ++row)
    for (size_t i = 0; i < width; ++i) want[row * width + i] = in[static_cast<size_t>(rows[row]) * width + i];
  check.equal_bits(name, out.data(), want.data(), out.bytes());
}

}  // namespace

void check_gather_rows(Check& check) {
  for (const int32_t size : {4, 8, 64, 576}) check_size(check, size, {5, 0, 2, 2});
  check_size(check, 4100, {4});  // more than one block takes

  check.success("no rows", gather_rows(nullptr, nullptr, nullptr, 0, 64, nullptr));
  check.success("no columns", gather_rows(nullptr, nullptr, nullptr, 3, 0, nullptr));
  check.fails("size -4", gather_rows(nullptr, nullptr, nullptr, 1, -4, nullptr), cudaErrorInvalidValue);
  check.fails("size 6", gather_rows(nullptr, nullptr, nullptr, 1, 6, nullptr), cudaErrorInvalidValue);
  check.fails("-1 rows", gather_rows(nullptr, nullptr, nullptr, -1, 64, nullptr), cudaErrorInvalidValue);
}
