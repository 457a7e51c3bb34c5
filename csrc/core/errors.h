// Errors a user can meet. Each class maps to the Python class of the same name in steploop.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace steploop {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

#define STEPLOOP_ERROR(name, base) \
  struct name : base {             \
    using base::base;              \
  };
STEPLOOP_ERROR(InvalidArgumentError, Error)      // a bad engine or model setting
STEPLOOP_ERROR(InvalidRequestError, Error)       // a bad prompt or sampling parameter
STEPLOOP_ERROR(RequestTooLongError, InvalidRequestError)
STEPLOOP_ERROR(DuplicateRequestError, InvalidRequestError)
STEPLOOP_ERROR(QueueFullError, Error)
STEPLOOP_ERROR(ModelLoadError, Error)
STEPLOOP_ERROR(UnsupportedModelError, Error)
STEPLOOP_ERROR(UnsupportedDeviceError, Error)
STEPLOOP_ERROR(EngineDeadError, Error)           // a step failed inside; the engine takes no more work
STEPLOOP_ERROR(InternalError, Error)             // a broken invariant: a bug in steploop
#undef STEPLOOP_ERROR

// "a" + 3 + "b" without iostreams.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  [[maybe_unused]] auto append = [&out](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
      out += std::to_string(part);
    else
      out += part;
  };
  (append(parts), ...);
  return out;
}

}  // namespace steploop
