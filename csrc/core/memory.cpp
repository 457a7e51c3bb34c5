// Buffer: anonymous mappings, aligned to huge pages when large. Arena.
#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "core/errors.h"
#include "core/types.h"

namespace steploop {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
}  // namespace

Buffer::Buffer(size_t size_bytes) : size_(size_bytes) {
  if (size_bytes == 0) return;
  const bool huge = size_bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kPage;
  // Only the start is aligned to a huge page: a last one that is partly used would cost 2 MiB of memory all the same.
  mapped_ = static_cast<size_t>(round_up(static_cast<int64_t>(size_bytes), int64_t{kPage}));
  const size_t reserved = mapped_ + (huge ? kHugePage : 0);
  void* base = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    throw InvalidArgumentError(concat("could not reserve ", size_bytes, " bytes of memory: lower the KV cache size, ",
                                      "swap_space_bytes, max_num_batched_tokens or max_num_seqs"));
  // Trim both ends of the over-sized reservation to the aligned part.
  char* begin = static_cast<char*>(base);
  char* aligned = begin + (alignment - reinterpret_cast<uintptr_t>(begin) % alignment) % alignment;
  if (aligned != begin) munmap(begin, static_cast<size_t>(aligned - begin));
  const size_t tail = reserved - static_cast<size_t>(aligned - begin) - mapped_;
  if (tail) munmap(aligned + mapped_, tail);
#ifdef MADV_HUGEPAGE
  if (huge) madvise(aligned, mapped_, MADV_HUGEPAGE);
#endif
  data_ = aligned;
}

Buffer::~Buffer() {
  if (mapped_) munmap(data_, mapped_);
}

Buffer Buffer::view(void* data, size_t size_bytes) {
  Buffer buffer;
  buffer.data_ = data;
  buffer.size_ = size_bytes;
  return buffer;
}

Buffer Arena::allocate(size_t size_bytes) {
  const auto size = static_cast<size_t>(round_up(static_cast<int64_t>(size_bytes), int64_t{kBufferAlignment}));
  if (chunks_.empty() || size > chunks_.back().size() - used_) {
    chunks_.emplace_back(std::max(size, kChunkSize));
    used_ = 0;
  }
  Buffer buffer = Buffer::view(chunks_.back().as<char>() + used_, size_bytes);
  used_ += size;
  return buffer;
}

}  // namespace steploop
