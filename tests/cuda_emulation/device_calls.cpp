// What device code calls: finds the CUDA thread that runs, checks its arguments and leaves the rest to BlockRunner.
#include <cstddef>
#include <cstdint>

#include "block.h"

namespace cuda_emulation {

namespace {

// A step outside is told with its place, even where no sanitizer looks.
void check_shared_row(const char* what, const void* row) {
  const BlockRunner& runner = this_runner();
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(current_thread->shared_memory);
  if (address % 16 != 0) fatal("%s %p is not a multiple of 16", what, row);
  if (offset + 16 > runner.launch().shared_bytes) {
    fatal("%s at byte %td of the block's %zu bytes of shared memory", what, static_cast<std::ptrdiff_t>(offset),
          runner.launch().shared_bytes);
  }
}

}  // namespace

void sync_block() { this_runner().sync_block(); }
void sync_warp(unsigned mask) { this_runner().sync_warp(mask); }

uint64_t shuffle(WarpOperation operation, unsigned mask, uint64_t value, unsigned source_lane, unsigned value_size) {
  FiberThread& self = this_runner().current();
  self.warp->value[self.lane] = value;
  self.warp->source_lane[self.lane] = source_lane;
  this_runner().meet(operation, mask, value_size);
  return self.warp->result[self.lane];
}

unsigned vote(WarpOperation operation, unsigned mask, bool predicate) {
  FiberThread& self = this_runner().current();
  self.warp->value[self.lane] = predicate;
  this_runner().meet(operation, mask);
  return static_cast<unsigned>(self.warp->result[self.lane]);
}

const void* const* exchange_rows(WarpOperation operation, const void* row) {
  FiberThread& self = this_runner().current();
  self.warp->value[self.lane] = reinterpret_cast<uintptr_t>(row);
  check_shared_row("ldmatrix: row", row);
  this_runner().meet(operation, 0xffffffffu);
  return self.warp->rows;
}

void multiply(WarpOperation operation, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  FiberThread& self = this_runner().current();
  MmaFragments& fragments = self.warp->fragments;
  for (int i = 0; i < 4; ++i) fragments.a[i][self.lane] = a[i];
  fragments.b[0][self.lane] = b0;
  fragments.b[1][self.lane] = b1;
  for (int i = 0; i < 4; ++i) fragments.d[i][self.lane] = d[i];
  this_runner().meet(operation, 0xffffffffu);
  for (int i = 0; i < 4; ++i) d[i] = fragments.d[i][self.lane];
}

bool begin_copy(const PendingCopy& copy) {
  FiberThread& self = this_runner().current();
  check_shared_row("cp.async: destination", copy.shared);
  if (copy.valid && reinterpret_cast<uintptr_t>(copy.global) % 16 != 0) {
    fatal("cp.async: source %p is not a multiple of 16", copy.global);
  }
  if (this_runner().launch().settings.eager_copies) return true;
  SanitizerIgnore ignore;
  self.copies.copies.push_back(copy);
  return false;
}

void close_copy_group() {
  SanitizerIgnore ignore;
  CopyQueue& queue = this_runner().current().copies;
  queue.group_ends.push_back(queue.copies.size());
}

bool take_copy(int num_pending, PendingCopy& copy) {
  CopyQueue& queue = this_runner().current().copies;
  const size_t num_groups = queue.group_ends.size();
  if (num_groups - queue.first_group > static_cast<size_t>(num_pending)) {
    const size_t end = queue.group_ends[num_groups - 1 - static_cast<size_t>(num_pending)];
    if (queue.begin < end) {
      copy = queue.copies[queue.begin++];
      return true;
    }
    queue.first_group = num_groups - static_cast<size_t>(num_pending);
  }
  if (queue.begin > 4096) {  // what has been copied goes now and then
    for (size_t i = queue.first_group; i < num_groups; ++i) queue.group_ends[i] -= queue.begin;
    queue.group_ends.erase(queue.group_ends.begin(),
                           queue.group_ends.begin() + static_cast<std::ptrdiff_t>(queue.first_group));
    queue.copies.erase(queue.copies.begin(), queue.copies.begin() + static_cast<std::ptrdiff_t>(queue.begin));
    queue.begin = queue.first_group = 0;
  }
  return false;
}

}  // namespace cuda_emulation
