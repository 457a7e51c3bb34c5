// The engine's clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace steploop {

// Microseconds of the steady clock, which is Python's time.monotonic().
inline int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace steploop
