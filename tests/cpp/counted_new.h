// Replaces operator new in the program that includes this: counts allocations by every thread, and lets the next one
// fail on demand. One file of a program only.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

inline std::atomic<int64_t> num_allocations{0};
inline std::atomic<bool> fail_next_allocation{false};

inline void* count_and_allocate(std::size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (!fail_next_allocation.exchange(false, std::memory_order_relaxed))
    if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}

void* operator new(std::size_t size) { return count_and_allocate(size); }
void* operator new[](std::size_t size) { return count_and_allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
