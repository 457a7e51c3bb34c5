// Block transfers: the named blocks arrive in every layer, and nothing else changes.
#include <cuda_runtime_api.h>

#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using namespace steploop;
using namespace steploop::cuda;

using Pairs = std::vector<std::pair<size_t, size_t>>;  // source, destination

constexpr size_t kLayers = 2;

std::vector<Exact<uint8_t>> random_layers(Check& check, size_t num_blocks, size_t block_bytes) {
  std::vector<Exact<uint8_t>> layers;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    layers.emplace_back(num_blocks * block_bytes);
    for (uint8_t& byte : layers.back()) byte = static_cast<uint8_t>(check.random());
  }
  return layers;
}

int transfer(const std::vector<Exact<uint8_t>>& from, std::vector<Exact<uint8_t>>& to, const Pairs& pairs,
             size_t block_bytes) {
  Exact<const void*> from_layers(kLayers);
  Exact<void*> to_layers(kLayers);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    from_layers[layer] = from[layer].data();
    to_layers[layer] = to[layer].data();
  }
  Exact<int32_t> ids(2 * pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    ids[2 * i] = static_cast<int32_t>(pairs[i].first);
    ids[2 * i + 1] = static_cast<int32_t>(pairs[i].second);
  }
  return transfer_blocks({from_layers.data(), to_layers.data(), ids.data(), static_cast<int64_t>(block_bytes), kLayers,
                          static_cast<int32_t>(pairs.size())},
                         nullptr);
}

void check_block_bytes(Check& check, size_t block_bytes) {
  const std::string name = std::to_string(block_bytes) + " bytes";
  const auto copy = [&](const std::vector<Exact<uint8_t>>& from, std::vector<Exact<uint8_t>>& to, const Pairs& pairs) {
    for (size_t layer = 0; layer < kLayers; ++layer)
      for (const auto& [source, destination] : pairs)
        std::copy_n(from[layer].begin() + source * block_bytes, block_bytes,
                    to[layer].begin() + destination * block_bytes);
  };
  const auto compare = [&](const std::string& what, const std::vector<Exact<uint8_t>>& got,
                           const std::vector<Exact<uint8_t>>& want) {
    for (size_t layer = 0; layer < kLayers; ++layer)
      check.equal_bits(name + what, got[layer].data(), want[layer].data(), want[layer].bytes());
  };

  const std::vector<Exact<uint8_t>> host = random_layers(check, 4, block_bytes);
  std::vector<Exact<uint8_t>> pool = random_layers(check, 6, block_bytes), want = pool;
  const Pairs pairs = {{3, 0}, {1, 5}};
  check.success(name, transfer(host, pool, pairs, block_bytes));
  copy(host, want, pairs);
  compare("", pool, want);

  const Pairs inside = {{5, 1}};
  check.success(name + ", one pool", transfer(pool, pool, inside, block_bytes));
  copy(want, want, inside);
  compare(", one pool", pool, want);
}

}  // namespace

void check_transfer_blocks(Check& check) {
  for (const size_t block_bytes : {16, 96, 4608, 16400}) check_block_bytes(check, block_bytes);  // the last: two parts

  check.success("no pairs", transfer_blocks({nullptr, nullptr, nullptr, 64, 2, 0}, nullptr));
  check.success("no layers", transfer_blocks({nullptr, nullptr, nullptr, 64, 0, 2}, nullptr));
  check.success("no bytes", transfer_blocks({nullptr, nullptr, nullptr, 0, 2, 2}, nullptr));
  check.fails("-16 bytes", transfer_blocks({nullptr, nullptr, nullptr, -16, 1, 1}, nullptr), cudaErrorInvalidValue);
  check.fails("24 bytes", transfer_blocks({nullptr, nullptr, nullptr, 24, 1, 1}, nullptr), cudaErrorInvalidValue);
  check.fails("2 GiB", transfer_blocks({nullptr, nullptr, nullptr, int64_t{1} << 31, 1, 1}, nullptr),
              cudaErrorInvalidValue);
  check.fails("-1 pairs", transfer_blocks({nullptr, nullptr, nullptr, 64, 1, -1}, nullptr), cudaErrorInvalidValue);
  check.fails("65536 layers", transfer_blocks({nullptr, nullptr, nullptr, 64, 65536, 1}, nullptr),
              cudaErrorInvalidValue);
  check.fails("-1 layers", transfer_blocks({nullptr, nullptr, nullptr, 64, -1, 1}, nullptr), cudaErrorInvalidValue);
}
