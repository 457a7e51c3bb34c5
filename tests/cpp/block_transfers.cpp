// Block transfers: lists full of chains and conflicts, against copying block by block. `block_transfers cuda` tests the
// CUDA backend instead of the CPU's, on whatever device STEPLOOP_CUDA_LIBRARY leads to.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "exec/cuda_backend.h"
#include "exec/exec.h"

using namespace steploop;

namespace {

constexpr int32_t kNumLayers = 3;

struct Shape {
  DType dtype;
  int32_t num_kv_heads, head_dim, block_size;
  int32_t num_blocks[2];  // by pool
};

// How often a list brought what makes its order matter.
struct Met {
  int64_t transfers = 0;
  int64_t chains = 0;  // reads what an earlier one wrote
  int64_t overwrites = 0;  // writes what an earlier one wrote
  int64_t reuses = 0;  // writes what an earlier one read
};

ExecOptions exec_options(const Shape& shape, int32_t num_threads) {
  return {.num_threads = num_threads,
          .num_heads = shape.num_kv_heads,
          .num_kv_heads = shape.num_kv_heads,
          .head_dim = shape.head_dim,
          .hidden_size = 64,
          .vocab_size = 64,
          .num_layers = kNumLayers,
          .max_out_features = 64,
          .max_num_batched_tokens = 8,
          .max_num_sequences = 4,
          .max_num_sample_rows = 4,
          .max_blocks_per_sequence = 4,
          .num_kv_blocks = shape.num_blocks[kDevicePool],
          .num_host_blocks = shape.num_blocks[kHostPool]};
}

class Pools {
 public:
  Pools(Device device, const Shape& shape, int32_t num_threads, uint64_t seed)
      : device_(device), shape_(shape), random_(seed), exec_(make_exec(device, exec_options(shape, num_threads))) {
    for (int32_t layer = 0; layer < kNumLayers; ++layer) {
      layers_[kDevicePool].push_back(exec_->make_kv_layer(shape.dtype, shape.num_kv_heads, shape.head_dim,
                                                          shape.block_size, shape.num_blocks[kDevicePool]));
      layers_[kHostPool].push_back(exec_->make_host_kv_layer(layers_[kDevicePool].back(), shape.num_blocks[kHostPool]));
    }
    block_bytes_ = static_cast<size_t>(layers_[kDevicePool][0].block_bytes);
    for (const int32_t pool : {kDevicePool, kHostPool}) fill(pool);
  }

  std::vector<BlockTransfer> random_transfers(size_t count) {
    std::vector<BlockTransfer> transfers;
    while (transfers.size() < count) {
      BlockTransfer transfer;
      const auto draw = [this](int32_t& pool, BlockId& block) {
        pool = shape_.num_blocks[kHostPool] > 0 && random_() % 2 ? kHostPool : kDevicePool;
        block = static_cast<BlockId>(random_() % static_cast<uint64_t>(shape_.num_blocks[pool]));
      };
      draw(transfer.src_pool, transfer.src_block);
      draw(transfer.dst_pool, transfer.dst_block);
      if (transfer.src_pool == transfer.dst_pool && transfer.src_block == transfer.dst_block) continue;
      if (!transfers.empty() && random_() % 4) {  // runs between two pools, as swapping makes them
        if (transfer.src_pool != transfers.back().src_pool || transfer.dst_pool != transfers.back().dst_pool) continue;
      }
      transfers.push_back(transfer);
    }
    return transfers;
  }

  // Makes all lists in one run of the exec; true when every byte of both pools is what it should be.
  bool transfer(const std::vector<std::vector<BlockTransfer>>& lists) {
    for (const auto& list : lists)
      for (const BlockTransfer& transfer : list)
        for (int32_t layer = 0; layer < kNumLayers; ++layer)
          std::memcpy(expected_block(layer, transfer.dst_pool, transfer.dst_block),
                      expected_block(layer, transfer.src_pool, transfer.src_block), block_bytes_);
    bool good = true;
    exec_->run([&](TeamMember& member) {
      for (const auto& list : lists) exec_->transfer_blocks(member, {{layers_[kDevicePool], layers_[kHostPool]}, list});
      // What comes next on any one thread sees what all have copied.
      if (device_ == Device::kCpu && member.rank() == 0) good = matches(kDevicePool) && matches(kHostPool);
    });
    return good && matches(kDevicePool) && matches(kHostPool);
  }

 private:
  size_t pool_bytes(int32_t pool) const { return static_cast<size_t>(shape_.num_blocks[pool]) * block_bytes_; }
  char* expected_block(int32_t layer, int32_t pool, BlockId block) {
    return expected_[pool][static_cast<size_t>(layer)].data() + static_cast<size_t>(block) * block_bytes_;
  }

  void fill(int32_t pool) {
    for (const KvCacheView& view : layers_[pool]) {
      std::vector<char>& bytes = expected_[pool].emplace_back(pool_bytes(pool));
      for (char& byte : bytes) byte = static_cast<char>(random_());
      if (pool == kDevicePool)
        exec_->upload(view.data, bytes.data(), bytes.size());
      else if (!bytes.empty())
        std::memcpy(view.data, bytes.data(), bytes.size());
    }
  }

  bool matches(int32_t pool) {
    std::vector<char> bytes(pool_bytes(pool));
    for (size_t layer = 0; layer < kNumLayers; ++layer) {
      const KvCacheView& view = layers_[pool][layer];
      if (pool == kDevicePool)
        exec_->download(bytes.data(), view.data, bytes.size());
      else if (!bytes.empty())
        std::memcpy(bytes.data(), view.data, bytes.size());
      if (bytes != expected_[pool][layer]) {
        std::printf("pool %d, layer %zu differs\n", pool, layer);
        return false;
      }
    }
    return true;
  }

  const Device device_;
  const Shape shape_;
  std::mt19937_64 random_;
  std::unique_ptr<Exec> exec_;
  size_t block_bytes_ = 0;
  std::vector<KvCacheView> layers_[2];  // by pool
  std::vector<std::vector<char>> expected_[2];  // by pool, then layer
};

void count(const std::vector<BlockTransfer>& transfers, Met& met) {
  std::vector<std::pair<int32_t, BlockId>> read, written;
  const auto contains = [](const auto& blocks, std::pair<int32_t, BlockId> block) {
    return std::find(blocks.begin(), blocks.end(), block) != blocks.end();
  };
  for (const BlockTransfer& transfer : transfers) {
    const std::pair source{transfer.src_pool, transfer.src_block}, destination{transfer.dst_pool, transfer.dst_block};
    ++met.transfers;
    met.chains += contains(written, source);
    met.overwrites += contains(written, destination);
    met.reuses += contains(read, destination);
    read.push_back(source);
    written.push_back(destination);
  }
}

// Every layer and every byte of a block differs, so that none can come from a wrong place unnoticed.
bool check(Device device, const Shape& shape, int32_t num_threads, Met& met) {
  Pools pools(device, shape, num_threads, 7);
  for (int run = 0; run < 60; ++run) {
    std::vector<std::vector<BlockTransfer>> lists;
    for (int i = 0; i <= run % 3; ++i)
      count(lists.emplace_back(pools.random_transfers(static_cast<size_t>(run) % 40)), met);
    if (!pools.transfer(lists)) {
      std::printf("%s, blocks of %d tokens, %d threads: run %d\n", dtype_name(shape.dtype), shape.block_size,
                  num_threads, run);
      return false;
    }
  }
  return true;
}

// More than any one upload holds, one call after the other.
bool check_long_lists(Device device, DType dtype) {
  Pools pools(device, {dtype, 1, 64, 8, {300, 200}}, 2, 8);
  return pools.transfer({pools.random_transfers(9000), pools.random_transfers(20)});
}

// The emulated device's launches run their blocks in a random order, on several threads.
void shuffle_emulated_launches() {
  const char* path = std::getenv("STEPLOOP_CUDA_LIBRARY");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) return;
  const auto set = reinterpret_cast<void (*)(int, uint64_t, int, int)>(dlsym(library, "steploop_emulation_set"));
  if (set) set(2, 3, 1, 2);
}

}  // namespace

int main(int argc, char** argv) {
  const Device device = device_from_name(argc > 1 ? argv[1] : "cpu");
  const bool cuda = device == Device::kCuda;
  if (cuda) shuffle_emulated_launches();
  const DType dtypes[] = {DType::kBFloat16, cuda ? DType::kFloat16 : DType::kFloat32};
  bool good = true;
  Met met;
  for (const DType dtype : dtypes) {
    const Shape shapes[] = {{dtype, 1, 64, 8, {5, 3}}, {dtype, 3, 96, 16, {12, 9}}, {dtype, 2, 128, 64, {7, 0}}};
    for (const Shape& shape : shapes)
      for (const int32_t num_threads : cuda ? std::vector{1} : std::vector{1, 3})
        good = good && check(device, shape, num_threads, met);
    good = good && check_long_lists(device, dtype);
  }
  std::printf("block transfers on %s: %lld; sources written before %lld, destinations written %lld, read %lld: %s\n",
              cuda ? cuda_backend().device_name().c_str() : "the CPU", static_cast<long long>(met.transfers),
              static_cast<long long>(met.chains), static_cast<long long>(met.overwrites),
              static_cast<long long>(met.reuses), good ? "ok" : "FAILED");
  return good && met.chains > 500 && met.overwrites > 500 && met.reuses > 500 ? 0 : 1;
}
