// Counts every allocation of the program that includes this, by any thread: malloc and its family, operator new in all
// forms (it comes down to malloc) and mmap. Lets the next operator new fail on demand. One file of a program only.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

inline std::atomic<int64_t> num_allocations{0};
inline std::atomic<bool> fail_next_allocation{false};

inline void count_allocation() { num_allocations.fetch_add(1, std::memory_order_relaxed); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Sanitizers bring their own malloc: there only operator new is counted.
inline constexpr bool kCountsMalloc = false;
#else
inline constexpr bool kCountsMalloc = true;

extern "C" {
// glibc's own, under the names that stay when malloc is replaced.
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) noexcept {
  count_allocation();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) noexcept {
  count_allocation();
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) noexcept {
  count_allocation();
  return __libc_realloc(memory, size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept {
  count_allocation();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
  count_allocation();
  *memory = __libc_memalign(alignment, size);
  return *memory ? 0 : ENOMEM;
}
void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) noexcept {
  count_allocation();
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}
}
#endif

inline void* allocate_or_fail(std::size_t size) {
  if (!kCountsMalloc) count_allocation();
  if (!fail_next_allocation.exchange(false, std::memory_order_relaxed))
    if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}

void* operator new(std::size_t size) { return allocate_or_fail(size); }
void* operator new[](std::size_t size) { return allocate_or_fail(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
