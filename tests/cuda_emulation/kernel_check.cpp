// Runs the checks of the CUDA kernels in emulation: every order of threads, cp.async eager and lazy.
//
//   kernel_check [--quick] [name]...  the checks of that name, or all; --quick: not in every order
//   kernel_check --list               their names
//   kernel_check --self-test          whether misuse, races and bounds are caught, as far as this build can
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "self_test.h"

// The first race ends the program.
extern "C" const char* __tsan_default_options();
extern "C" __attribute__((no_sanitize_thread)) const char* __tsan_default_options() { return "halt_on_error=1"; }

// A program may be built with some of the checks only.
// clang-format off
#define KERNEL_CHECKS(CHECK)                                                                      \
  CHECK(emulation) CHECK(embedding) CHECK(rms_norm) CHECK(rope_kv_write) CHECK(silu_mul)          \
  CHECK(gather_rows) CHECK(transfer_blocks) CHECK(linear_epilogue) CHECK(gemm) CHECK(attention)   \
  CHECK(sample)
// clang-format on
#define WEAK(name) __attribute__((weak)) void check_##name(Check& check);
KERNEL_CHECKS(WEAK)
#undef WEAK

namespace {

struct NamedCheck {
  const char* name;
  void (*run)(Check&);  // null: not in this program
};

const NamedCheck kChecks[] = {
#define ENTRY(name) {#name, check_##name},
    KERNEL_CHECKS(ENTRY)
#undef ENTRY
};

using cuda_emulation::Order;

int run(const NamedCheck& check, bool quick) {
  const auto start = std::chrono::steady_clock::now();
  int num_failures = 0;
  Check::Results results;
  for (const bool eager : {true, false}) {
    for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
      // Quick: each kind of copy once, in orders that differ.
      if (quick && order != (eager ? Order::kReverse : Order::kRandom)) continue;
      cuda_emulation::settings().order = order;
      cuda_emulation::settings().eager_copies = eager;
      const char* order_name = order == Order::kForward ? "forward" : order == Order::kReverse ? "reverse" : "random";
      Check harness(check.name, std::string(order_name) + " order, cp.async " + (eager ? "eager" : "lazy"), results);
      check.run(harness);
      num_failures += harness.num_failures();
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%-16s %s %.2f s\n", check.name, num_failures == 0 ? "ok    " : "FAILED", seconds);
  std::fflush(stdout);
  return num_failures;
}

int main_with(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3 && arguments[0] == "--misuse") {
    return run_misuse(arguments[1].c_str(), arguments[2] == "lazy");
  }
  bool quick = false, list = false, test_self = false;
  std::vector<std::string> names;
  for (const std::string& argument : arguments) {
    if (argument == "--quick")
      quick = true;
    else if (argument == "--list")
      list = true;
    else if (argument == "--self-test")
      test_self = true;
    else if (argument.starts_with("-")) {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    } else {
      names.push_back(argument);
    }
  }
  if (list) {
    for (const NamedCheck& check : kChecks) {
      if (check.run != nullptr) std::printf("%s\n", check.name);
    }
    return 0;
  }
  if (test_self) return self_test() == 0 ? 0 : 1;
  int num_failures = 0;
  if (names.empty()) {
    for (const NamedCheck& check : kChecks) {
      if (check.run != nullptr) num_failures += run(check, quick);
    }
  }
  for (const std::string& name : names) {
    const NamedCheck* found = nullptr;
    for (const NamedCheck& check : kChecks) {
      if (name == check.name && check.run != nullptr) found = &check;
    }
    if (found == nullptr) {
      std::fprintf(stderr, "no check of that name in this program: %s\n", name.c_str());
      return 2;
    }
    num_failures += run(*found, quick);
  }
  if (num_failures > 0) std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return main_with({argv + 1, argv + argc}); }
