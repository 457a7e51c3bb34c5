// Invariants. SL_CHECK is always on and cheap; SL_DCHECK is for hot paths and is on in test builds.
#pragma once

#include "core/errors.h"

namespace steploop {
[[noreturn]] void check_failed(const char* condition, const char* file, int line, const std::string& message);
}

#define SL_CHECK(condition, ...)                                                                 \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::steploop::check_failed(#condition, __FILE__, __LINE__, ::steploop::concat(__VA_ARGS__)); \
  } while (0)

#ifdef STEPLOOP_DEBUG_CHECKS
#define SL_DCHECK(condition, ...) SL_CHECK(condition, __VA_ARGS__)
#else
#define SL_DCHECK(condition, ...) \
  do {                            \
  } while (0)
#endif
