// The clock that everything is timed by.
#pragma once

#include <chrono>
#include <cstdint>

namespace steploop {

// Nanoseconds of the steady clock, which is Python's time.monotonic().
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline int64_t now_us() { return now_ns() / 1000; }

}  // namespace steploop
