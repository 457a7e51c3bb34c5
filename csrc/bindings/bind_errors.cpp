// C++ errors become the Python classes of the same names in steploop.errors.
#include "bindings/bindings.h"
#include "core/errors.h"

namespace py = pybind11;

namespace steploop {

namespace {

void raise(const char* name, const Error& error) {
  const py::object type = py::module_::import("steploop.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    }
#define STEPLOOP_TRANSLATE(name) \
  catch (const name& error) {    \
    raise(#name, error);         \
  }
    STEPLOOP_TRANSLATE(RequestTooLongError)  // derived before base
    STEPLOOP_TRANSLATE(DuplicateRequestError)
    STEPLOOP_TRANSLATE(InvalidRequestError)
    STEPLOOP_TRANSLATE(InvalidArgumentError)
    STEPLOOP_TRANSLATE(QueueFullError)
    STEPLOOP_TRANSLATE(ModelLoadError)
    STEPLOOP_TRANSLATE(UnsupportedModelError)
    STEPLOOP_TRANSLATE(UnsupportedDeviceError)
    STEPLOOP_TRANSLATE(EngineDeadError)
    STEPLOOP_TRANSLATE(InternalError)
#undef STEPLOOP_TRANSLATE
    catch (const Error& error) {
      raise("SteploopError", error);
    }
  });
}

}  // namespace steploop
