// Token embedding against a look-up in the table: exact, every table value being a float32.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

constexpr int32_t kVocab = 7;

void check_table(Check& check, DType dtype, int32_t hidden_size, const std::vector<TokenId>& tokens) {
  const std::string name = std::string(dtype_name(dtype)) + ", hidden_size " + std::to_string(hidden_size);
  const size_t width = static_cast<size_t>(hidden_size);
  const Exact<uint16_t> halves = check.halves(dtype, kVocab * width);
  const Exact<float> floats = check.floats(kVocab * width);
  const Exact<TokenId> ids(tokens);
  Exact<float> out(ids.size() * width);
  const void* table = dtype == DType::kFloat32 ? static_cast<const void*>(floats.data()) : halves.data();
  const EmbeddingParams params = {ids.data(), out.data(), static_cast<int32_t>(ids.size()), hidden_size};
  check.success(name, embedding(params, table, dtype, nullptr));

  Exact<float> want(out.size());
  for (size_t row = 0; row < ids.size(); ++row)
    for (size_t i = 0; i < width; ++i) {
      const size_t source = static_cast<size_t>(ids[row]) * width + i;
      want[row * width + i] = dtype == DType::kFloat32 ? floats[source] : from_half(dtype, halves[source]);
    }
  check.equal_bits(name, out.data(), want.data(), out.bytes());
}

}  // namespace

void check_embedding(Check& check) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
    for (const int32_t hidden_size : {8, 64, 576}) check_table(check, dtype, hidden_size, {6, 3, 3});
  check_table(check, DType::kBFloat16, 4104, {5});  // more than one block takes

  check.success("no tokens", embedding({nullptr, nullptr, 0, 64}, nullptr, DType::kBFloat16, nullptr));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (const int32_t hidden_size : {12, -8})
      check.fails("hidden_size " + std::to_string(hidden_size),
                  embedding({nullptr, nullptr, 1, hidden_size}, nullptr, dtype, nullptr), cudaErrorInvalidValue);
  check.fails("-1 tokens", embedding({nullptr, nullptr, -1, 64}, nullptr, DType::kBFloat16, nullptr),
              cudaErrorInvalidValue);
}
