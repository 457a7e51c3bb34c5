// Runs the threads of a block as fibers (see block.h): who goes on next, barriers and warp-wide operations.
#include "block.h"

#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace cuda_emulation {

constinit thread_local Thread* current_thread __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constinit thread_local BlockRunner* runner __attribute__((tls_model("initial-exec"))) = nullptr;

}  // namespace

BlockRunner& this_runner() { return *runner; }

const char* operation_name(WarpOperation operation) {
  static constexpr const char* kNames[] = {
      "__syncwarp",        "__shfl_sync",      "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync",
      "__ballot_sync",     "__any_sync",       "__all_sync",      "load_matrix_x4", "load_matrix_x4_transposed",
      "mma_16x8x16<Bf16>", "mma_16x8x16<Fp16>"};
  return kNames[static_cast<int>(operation)];
}

void fatal(const char* format, ...) {
  char message[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  std::fflush(stdout);
  if (current_thread != nullptr) {
    const uint3 block = current_thread->block_index, thread = current_thread->thread_index;
    std::fprintf(stderr, "cuda_emulation: block (%u, %u, %u), thread (%u, %u, %u): %s\n", block.x, block.y, block.z,
                 thread.x, thread.y, thread.z, message);
  } else {
    std::fprintf(stderr, "cuda_emulation: %s\n", message);
  }
  std::abort();
}

// ---- A block from start to end --------------------------------------------------------------------------------------

BlockRunner::~BlockRunner() { finish(); }

void BlockRunner::finish() {
  SanitizerIgnore ignore;
  std::free(shared_memory_);
  shared_memory_ = nullptr;
}

void BlockRunner::allocate_shared_memory() {
#if defined(CUDA_EMULATION_ASAN) || defined(CUDA_EMULATION_TSAN)
  const bool is_new = true;
#else
  const bool is_new = shared_memory_ == nullptr || shared_bytes_ != launch_->shared_bytes;
#endif
  SanitizerIgnore ignore;
  shared_bytes_ = launch_->shared_bytes;
  if (is_new) {
    std::free(shared_memory_);
    if (posix_memalign(&shared_memory_, 128, shared_bytes_) != 0) fatal("no memory for a block's shared memory");
  }
  std::memset(shared_memory_, 0xff, shared_bytes_);
}

void BlockRunner::prepare(uint3 block_index) {
  SanitizerIgnore ignore;
  const dim3 block = launch_->block;
  num_threads_ = num_live_ = static_cast<int>(block.x * block.y * block.z);
  num_at_barrier_ = 0;
  ready_warps_ = 0;
  barrier_tags_ = std::make_unique<Tags>();
  allocate_shared_memory();
  if (threads_.size() < static_cast<size_t>(num_threads_)) threads_.resize(static_cast<size_t>(num_threads_));
  const size_t num_warps = static_cast<size_t>(num_threads_ + 31) / 32;
  if (warps_.size() < num_warps) warps_.resize(num_warps);
  for (Warp& warp : warps_) {
    warp.live = warp.ready = 0;
    warp.num_waiting = 0;
    warp.tags.clear();
  }
  fibers_.adopt_host(host_);
  fibers_.begin_block(num_threads_);
  uint3 index{0, 0, 0};
  for (int i = 0; i < num_threads_; ++i) {
    FiberThread& thread = threads_[static_cast<size_t>(i)];
    thread.thread_index = index;
    thread.block_index = block_index;
    thread.lane = static_cast<unsigned>(i) % 32;
    thread.grid = {launch_->grid, block};
    thread.shared_memory = shared_memory_;
    thread.warp = &warps_[static_cast<size_t>(i) / 32];
    thread.warp->live |= 1u << thread.lane;
    thread.index = i;
    thread.waits_for = nullptr;
    thread.copies.copies.clear();
    thread.copies.group_ends.clear();
    thread.copies.begin = thread.copies.first_group = 0;
    fibers_.prepare(thread.context, i, &BlockRunner::entry);
    if (++index.x == block.x) {
      index.x = 0;
      if (++index.y == block.y) index.y = 0, ++index.z;
    }
  }
  for (size_t i = 0; i < num_warps; ++i) make_ready(warps_[i], warps_[i].live);
}

void BlockRunner::run(Launch& launch, uint3 block_index, uint64_t seed) {
  launch_ = &launch;
  random_state_ = seed | 1;
  runner = this;
  host_.stack_bottom = nullptr;
  prepare(block_index);
  sanitizer_release(launch.start_tag);
  switch_context(host_, next());
  current_thread = nullptr;
  current_ = nullptr;
}

void BlockRunner::entry() {
  BlockRunner& self = *runner;
  enter_fiber(self.host_);
  sanitizer_acquire(self.launch_->start_tag);
  self.launch_->kernel(self.launch_->arguments);
  self.end_current();
}

void BlockRunner::end_current() {
  FiberThread& thread = *current_;
  sanitizer_release(launch_->end_tag);
  sanitizer_release(barrier_tags_->current());
  thread.warp->live &= ~(1u << thread.lane);
  --num_live_;
  check_barrier();
  for (int i = thread.warp->num_waiting; i-- > 0;) complete_if_met(*thread.warp, i);
  switch_context(thread.context, next(), true);
  std::abort();  // nobody switches to a fiber that has ended
}

// ---- Who goes on ----------------------------------------------------------------------------------------------------

uint64_t BlockRunner::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ * 0x2545f4914f6cdd1dull >> 32;
}

void BlockRunner::make_ready(Warp& warp, unsigned lanes) {
  warp.ready |= lanes;
  if (warp.ready != 0) ready_warps_ |= 1u << (&warp - warps_.data());
}

// The lowest (or highest) thread runs until it must wait, so that warps drift apart as far as barriers let them.
Context& BlockRunner::next() {
  if (ready_warps_ == 0) {
    if (num_live_ > 0) report_deadlock();
    return host_;
  }
  const auto choose = [&](unsigned bits) {
    if (launch_->settings.order == Order::kForward) return static_cast<unsigned>(std::countr_zero(bits));
    if (launch_->settings.order == Order::kReverse) return 31 - static_cast<unsigned>(std::countl_zero(bits));
    const unsigned from = static_cast<unsigned>(random()) % 32;  // the first from there on
    return (from + static_cast<unsigned>(std::countr_zero(std::rotr(bits, static_cast<int>(from))))) % 32;
  };
  const unsigned warp_index = choose(ready_warps_);
  Warp& warp = warps_[warp_index];
  const unsigned lane = choose(warp.ready);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) ready_warps_ &= ~(1u << warp_index);
  current_ = &threads_[warp_index * 32 + lane];
  current_thread = current_;
  return current_->context;
}

void BlockRunner::wait(const char* what, unsigned mask) {
  FiberThread& self = *current_;
  self.waits_for = what;
  self.waits_with = mask;
  Context& to = next();
  if (&to != &self.context) switch_context(self.context, to);
  self.waits_for = nullptr;
}

void BlockRunner::report_deadlock() {
  std::string message = "deadlock: nobody can go on.";
  for (int first = 0; first < num_threads_;) {
    const auto state = [&](int i) {
      const FiberThread& thread = threads_[static_cast<size_t>(i)];
      const bool live = thread.warp->live >> thread.lane & 1;
      return std::make_pair(live ? thread.waits_for : nullptr, live ? thread.waits_with : 0u);
    };
    int end = first + 1;
    while (end < num_threads_ && state(end) == state(first)) ++end;
    const auto [what, mask] = state(first);
    char text[120];
    if (what == nullptr) {
      std::snprintf(text, sizeof(text), " Threads %d..%d have ended.", first, end - 1);
    } else if (mask == 0) {
      std::snprintf(text, sizeof(text), " Threads %d..%d wait at %s.", first, end - 1, what);
    } else {
      std::snprintf(text, sizeof(text), " Threads %d..%d wait at %s of lanes %08x.", first, end - 1, what, mask);
    }
    message += text;
    first = end;
    if (message.size() > 300) {
      message += " ...";
      break;
    }
  }
  fatal("%s", message.c_str());
}

// ---- Barriers and warp-wide operations ------------------------------------------------------------------------------

void BlockRunner::check_barrier() {
  if (num_live_ == 0 || num_at_barrier_ < num_live_) return;
  num_at_barrier_ = 0;
  ++barrier_tags_->generation;
  for (Warp& warp : warps_) make_ready(warp, warp.live);
}

void BlockRunner::sync_block() {
  void* tag = barrier_tags_->current();
  sanitizer_release(tag);
  ++num_at_barrier_;
  check_barrier();
  wait("__syncthreads", 0);
  sanitizer_acquire(tag);
}

void BlockRunner::complete_if_met(Warp& warp, int waiting_index) {
  const Rendezvous met = warp.waiting[waiting_index];
  const unsigned members = met.mask & warp.live;
  if (met.arrived != members) return;
  warp.waiting[waiting_index] = warp.waiting[--warp.num_waiting];
  switch (met.operation) {
    case WarpOperation::kSyncWarp: ++tags_of(warp, met.mask).generation; break;
    case WarpOperation::kShuffle:
    case WarpOperation::kShuffleXor:
    case WarpOperation::kShuffleUp:
    case WarpOperation::kShuffleDown:
      for (unsigned lane = 0; lane < 32; ++lane) {
        if ((members >> lane & 1) == 0) continue;
        const unsigned source = warp.source_lane[lane];
        // What comes from a lane that takes no part is undefined.
        warp.result[lane] = members >> source & 1 ? warp.value[source] : ~uint64_t{0};
      }
      break;
    case WarpOperation::kBallot:
    case WarpOperation::kAny:
    case WarpOperation::kAll: {
      unsigned ballot = 0;
      for (unsigned lane = 0; lane < 32; ++lane) {
        if ((members >> lane & 1) != 0 && warp.value[lane] != 0) ballot |= 1u << lane;
      }
      for (unsigned lane = 0; lane < 32; ++lane) {
        if ((members >> lane & 1) != 0) warp.result[lane] = ballot;
      }
      break;
    }
    case WarpOperation::kLoadMatrix:
    case WarpOperation::kLoadMatrixTransposed:
      for (unsigned lane = 0; lane < 32; ++lane) warp.rows[lane] = reinterpret_cast<const void*>(warp.value[lane]);
      break;
    case WarpOperation::kMmaBf16: multiply_bf16(warp.fragments); break;
    case WarpOperation::kMmaFp16: multiply_fp16(warp.fragments); break;
  }
  if (met.operation >= WarpOperation::kLoadMatrix && members != 0xffffffffu) {
    fatal("%s needs a whole warp, but only lanes %08x are there", operation_name(met.operation), members);
  }
  make_ready(warp, members);
}

void BlockRunner::meet(WarpOperation operation, unsigned mask, unsigned value_size) {
  FiberThread& self = *current_;
  Warp& warp = *self.warp;
  const char* name = operation_name(operation);
  if ((mask >> self.lane & 1) == 0) {
    fatal("divergent warp: lane %u calls %s for lanes %08x, itself not among them", self.lane, name, mask);
  }
  int index = 0;
  for (; index < warp.num_waiting; ++index) {
    const Rendezvous& other = warp.waiting[index];
    // Lanes that neither wait for this one nor are waited for by it may be elsewhere.
    if ((other.mask >> self.lane & 1) == 0 || (other.arrived & mask) == 0) continue;
    if (other.mask == mask && other.operation == operation && other.value_size == value_size) break;
    fatal("divergent warp: lane %u calls %s for lanes %08x while lanes %08x wait at %s for lanes %08x%s", self.lane,
          name, mask, other.arrived, operation_name(other.operation), other.mask,
          other.value_size != value_size ? ", with values of another size" : "");
  }
  if (index == warp.num_waiting) warp.waiting[warp.num_waiting++] = {mask, 0, operation, value_size};
  warp.waiting[index].arrived |= 1u << self.lane;
  complete_if_met(warp, index);
  wait(name, mask);
}

Tags& BlockRunner::tags_of(Warp& warp, unsigned mask) {
  for (const std::unique_ptr<Tags>& tags : warp.tags) {
    if (tags->mask == mask) return *tags;
  }
  SanitizerIgnore ignore;
  warp.tags.push_back(std::make_unique<Tags>());
  warp.tags.back()->mask = mask;
  return *warp.tags.back();
}

void BlockRunner::sync_warp(unsigned mask) {
  void* tag = tags_of(*current_->warp, mask).current();
  sanitizer_release(tag);
  meet(WarpOperation::kSyncWarp, mask);
  sanitizer_acquire(tag);
}

}  // namespace cuda_emulation
