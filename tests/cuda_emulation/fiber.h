// Stacks to switch between on one thread of the host, and what sanitizers must be told about it.
#pragma once

#include <cstddef>
#include <vector>

namespace cuda_emulation {

#if defined(CUDA_EMULATION_ASAN) || defined(CUDA_EMULATION_TSAN)
inline constexpr size_t kStackBytes = 256 * 1024;
#else
inline constexpr size_t kStackBytes = 64 * 1024;
#endif

struct Context {
  void* stack_pointer = nullptr;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
};

// Leaves `from` (for good, if it is done) and goes on in `to`.
void switch_context(Context& from, Context& to, bool done = false);
// The first thing that a fiber does. `starter` is whoever switched to the very first one.
void enter_fiber(Context& starter);

// The fibers of a block, each with a stack whose lowest page is a guard. They are used again and again.
//
// To ThreadSanitizer each is a thread, and making one takes it most of a millisecond. So a CUDA thread gets a fiber
// that was another's before, and what that one knew: a race between the two would not be seen. Blocks that come after
// each other therefore take different fibers, as many as there are before the first is taken again.
class Fibers {
 public:
  Fibers();
  Fibers(const Fibers&) = delete;
  ~Fibers();

  void adopt_host(Context& host);  // the calling thread
  void begin_block(int num_threads);
  // Makes `context` start with `entry`, which must not return, as thread number `index` of the block.
  void prepare(Context& context, int index, void (*entry)());

 private:
  static constexpr int kMost = 2048;

  char* stacks_;
  std::vector<void*> tsan_fibers_;
  int first_ = 0;  // of this block
  int next_ = 0;   // of the next
};

void sanitizer_acquire(void* tag);
void sanitizer_release(void* tag);

// While one lives, ThreadSanitizer takes memory that comes and goes as new, and looks at no access.
class SanitizerIgnore {
 public:
  SanitizerIgnore();
  SanitizerIgnore(const SanitizerIgnore&) = delete;
  ~SanitizerIgnore();
};

}  // namespace cuda_emulation
