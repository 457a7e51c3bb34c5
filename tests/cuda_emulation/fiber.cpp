// Stacks to switch between on one thread of the host (see fiber.h).
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "cuda_emulation.h"

#ifdef CUDA_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDA_EMULATION_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

// Saves what a function must preserve on the stack, leaves its address in *save and goes on where `load` was saved.
extern "C" void cuda_emulation_switch_stack(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_emulation_switch_stack
.hidden cuda_emulation_switch_stack
.type cuda_emulation_switch_stack, @function
cuda_emulation_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulation_switch_stack, . - cuda_emulation_switch_stack
)");
// From the saved address upwards: six registers, the address to return to, an empty one that entry() takes for its own.
static constexpr int kFrameWords = 8, kEntryWord = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl cuda_emulation_switch_stack
.hidden cuda_emulation_switch_stack
.type cuda_emulation_switch_stack, %function
cuda_emulation_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cuda_emulation_switch_stack, . - cuda_emulation_switch_stack
)");
static constexpr int kFrameWords = 20, kEntryWord = 11;
#else
#error "CUDA emulation knows how to switch stacks on x86-64 and AArch64 only"
#endif

namespace cuda_emulation {

void switch_context(Context& from, Context& to, [[maybe_unused]] bool done) {
#ifdef CUDA_EMULATION_TSAN
  __tsan_switch_to_fiber(to.tsan_fiber, 1);  // 1: this orders nothing
#endif
#ifdef CUDA_EMULATION_ASAN
  __sanitizer_start_switch_fiber(done ? nullptr : &from.asan_fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  cuda_emulation_switch_stack(&from.stack_pointer, to.stack_pointer);
#ifdef CUDA_EMULATION_ASAN
  __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
#endif
}

void enter_fiber([[maybe_unused]] Context& starter) {
#ifdef CUDA_EMULATION_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (starter.stack_bottom == nullptr) {
    starter.stack_bottom = bottom;
    starter.stack_bytes = bytes;
  }
#endif
}

Fibers::Fibers() : tsan_fibers_(kMost) {
  SanitizerIgnore ignore;
  void* memory =
      mmap(nullptr, kMost * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fatal("no memory for stacks");
  stacks_ = static_cast<char*>(memory);
  for (int i = 0; i < kMost; ++i) mprotect(stacks_ + i * kStackBytes, 4096, PROT_NONE);
}

Fibers::~Fibers() {
  munmap(stacks_, kMost * kStackBytes);
#ifdef CUDA_EMULATION_TSAN
  for (void* fiber : tsan_fibers_) {
    if (fiber != nullptr) __tsan_destroy_fiber(fiber);
  }
#endif
}

void Fibers::adopt_host([[maybe_unused]] Context& host) {
#ifdef CUDA_EMULATION_TSAN
  host.tsan_fiber = __tsan_get_current_fiber();
#endif
}

void Fibers::begin_block([[maybe_unused]] int num_threads) {
#ifdef CUDA_EMULATION_TSAN
  const int most = num_threads > kMost / 4 ? kMost : kMost / 2;  // fibers are large, too
  first_ = next_ + num_threads <= most ? next_ : 0;
  next_ = first_ + num_threads;
#endif
}

void Fibers::prepare(Context& context, int index, void (*entry)()) {
  const int number = first_ + index;
  char* bottom = stacks_ + number * kStackBytes;
  // Stacks that all began at one offset in their pages would fight for the same few cache lines.
  const size_t offset = static_cast<size_t>(number) * 320 % 4096;
  void** frame = reinterpret_cast<void**>(bottom + kStackBytes - 64 - offset) - kFrameWords;
  for (int i = 0; i < kFrameWords; ++i) frame[i] = nullptr;
  frame[kEntryWord] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
  context.stack_bottom = bottom;
  context.stack_bytes = kStackBytes;
#ifdef CUDA_EMULATION_TSAN
  void*& fiber = tsan_fibers_[static_cast<size_t>(number)];
  if (fiber == nullptr) fiber = __tsan_create_fiber(0);
  context.tsan_fiber = fiber;
#endif
}

#ifdef CUDA_EMULATION_TSAN

void sanitizer_acquire(void* tag) { __tsan_acquire(tag); }
void sanitizer_release(void* tag) { __tsan_release(tag); }

SanitizerIgnore::SanitizerIgnore() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}

SanitizerIgnore::~SanitizerIgnore() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

#else

void sanitizer_acquire(void*) {}
void sanitizer_release(void*) {}
SanitizerIgnore::SanitizerIgnore() {}
SanitizerIgnore::~SanitizerIgnore() {}

#endif

}  // namespace cuda_emulation
