// CudaTransfers: a list of transfers becomes uploads and launches.
#include "exec/cuda_transfers.h"

#include <algorithm>

#include "core/check.h"

namespace steploop {

namespace {

// A longer list takes several uploads.
constexpr size_t kMaxPairs = 8192;

size_t layers_bytes(size_t num_layers) { return 2 * num_layers * sizeof(void*); }

}  // namespace

size_t CudaTransfers::device_bytes(const ExecOptions& options) {
  return layers_bytes(static_cast<size_t>(options.num_layers)) + kMaxPairs * 2 * sizeof(int32_t);
}

CudaTransfers::CudaTransfers(const ExecOptions& options)
    : num_layers_(static_cast<size_t>(options.num_layers)),
      uses_{std::vector<BlockUse>(static_cast<size_t>(options.num_kv_blocks)),
            std::vector<BlockUse>(static_cast<size_t>(options.num_host_blocks))},
      host_(device_bytes(options), MemoryUse::kActivations),
      device_(host_.size(), MemoryUse::kActivations) {}

// How many of the first transfers one launch can make, whatever the order of its blocks: between the same two pools,
// and none writes what another reads or writes.
size_t CudaTransfers::take_launch(std::span<const BlockTransfer> transfers) {
  ++launch_;
  size_t count = 0;
  for (const BlockTransfer& transfer : transfers) {
    if (transfer.src_pool != transfers[0].src_pool || transfer.dst_pool != transfers[0].dst_pool) break;
    SL_DCHECK(static_cast<size_t>(transfer.src_block) < uses_[transfer.src_pool].size() &&
              static_cast<size_t>(transfer.dst_block) < uses_[transfer.dst_pool].size());
    BlockUse& source = uses_[transfer.src_pool][static_cast<size_t>(transfer.src_block)];
    BlockUse& destination = uses_[transfer.dst_pool][static_cast<size_t>(transfer.dst_block)];
    if (source.written_by == launch_ || destination.written_by == launch_ || destination.read_by == launch_) break;
    source.read_by = launch_;
    destination.written_by = launch_;
    ++count;
  }
  return count;
}

void CudaTransfers::upload(const TransferParams& params, std::span<const BlockTransfer> transfers, CudaStream stream) {
  uploaded_.wait();  // until the last upload has left host_; device_ is overwritten when the stream gets there
  void** layer = host_.as<void*>();
  for (const std::span<const KvCacheView> pool : params.pools) {
    SL_DCHECK(pool.size() == num_layers_);
    for (const KvCacheView& view : pool) *layer++ = view.data;
  }
  auto* id = reinterpret_cast<int32_t*>(layer);
  for (const BlockTransfer& transfer : transfers) {
    *id++ = transfer.src_block;
    *id++ = transfer.dst_block;
  }
  const size_t size_bytes = layers_bytes(num_layers_) + transfers.size() * 2 * sizeof(int32_t);
  check_cuda(cudaMemcpyAsync(device_.as<void>(), host_.as<void>(), size_bytes, cudaMemcpyHostToDevice, stream),
             "copying a step's block transfers");
  uploaded_.record(stream);
}

void CudaTransfers::enqueue(const TransferParams& params, CudaStream stream) {
  void* const* const layers = device_.as<void*>();
  const auto* const pairs = reinterpret_cast<const int32_t*>(device_.as<char>() + layers_bytes(num_layers_));
  for (std::span<const BlockTransfer> rest = params.transfers; !rest.empty();) {
    const auto transfers = rest.first(std::min(rest.size(), kMaxPairs));
    rest = rest.subspan(transfers.size());
    upload(params, transfers, stream);
    for (size_t begin = 0, count = 0; begin < transfers.size(); begin += count) {
      count = take_launch(transfers.subspan(begin));
      const BlockTransfer& first = transfers[begin];
      cuda::TransferBlocksParams launch;
      launch.src_layers = layers + static_cast<size_t>(first.src_pool) * num_layers_;
      launch.dst_layers = layers + static_cast<size_t>(first.dst_pool) * num_layers_;
      launch.pairs = pairs + 2 * begin;
      launch.block_bytes = params.pools[kDevicePool][0].block_bytes;
      launch.num_layers = static_cast<int32_t>(num_layers_);
      launch.num_pairs = static_cast<int32_t>(count);
      check_cuda(cuda::transfer_blocks(launch, stream), "transfer_blocks");
    }
  }
}

}  // namespace steploop
