// Finds and loads libsteploop_cuda.so.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "core/errors.h"
#include "exec/cuda_backend.h"

namespace steploop {

namespace {

// STEPLOOP_CUDA_LIBRARY, or else the library beside the one that this code is part of.
std::filesystem::path library_path() {
  if (const char* chosen = std::getenv("STEPLOOP_CUDA_LIBRARY"); chosen && *chosen) {
    if (std::error_code ignored; !std::filesystem::exists(chosen, ignored))
      throw UnsupportedDeviceError(concat("STEPLOOP_CUDA_LIBRARY names ", chosen, ": no such file"));
    return chosen;
  }
  Dl_info here{};
  std::filesystem::path path;
  if (dladdr(reinterpret_cast<const void*>(&cuda_backend), &here) && here.dli_fname)
    path = std::filesystem::path(here.dli_fname).parent_path() / "libsteploop_cuda.so";
  if (std::error_code ignored; !std::filesystem::exists(path, ignored))
    throw UnsupportedDeviceError(
        "device cuda: this build of steploop has no CUDA backend; use device=\"cpu\", or build steploop where nvcc is");
  return path;
}

const CudaBackend& load(const std::filesystem::path& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays loaded
  if (!library) throw UnsupportedDeviceError(concat("device cuda: cannot load the CUDA backend: ", dlerror()));
  const auto entry = reinterpret_cast<decltype(&steploop_cuda_backend)>(dlsym(library, "steploop_cuda_backend"));
  const auto version = reinterpret_cast<decltype(&steploop_cuda_version)>(dlsym(library, "steploop_cuda_version"));
  if (!entry || !version)
    throw UnsupportedDeviceError(concat("device cuda: ", path.string(), " is not steploop's CUDA backend"));
  if (std::strcmp(version(), STEPLOOP_VERSION) != 0)
    throw UnsupportedDeviceError(concat("device cuda: ", path.string(), " belongs to steploop ", version(),
                                        ", this is steploop ", STEPLOOP_VERSION));
  const CudaBackend& backend = *entry();
  backend.check_device();
  return backend;
}

}  // namespace

const CudaBackend& cuda_backend() {
  static std::mutex mutex;
  static std::map<std::filesystem::path, const CudaBackend*> loaded;
  const std::filesystem::path path = library_path();
  const std::lock_guard lock(mutex);
  const CudaBackend*& backend = loaded[path];
  if (!backend) backend = &load(path);  // what failed is tried again at the next call
  return *backend;
}

}  // namespace steploop
