// The emulated device and the state of its runtime, shared by the API and by launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace cuda_emulation {

// Set by the environment, e.g. STEPLOOP_EMULATED_DEVICE="count=1,major=9,minor=0,memory=1073741824,driver=13000,sm=4".
struct EmulatedDevice {
  int count = 1;
  int major = 9, minor = 0;
  int driver = 13000;
  int num_multiprocessors = 4;
  size_t memory = size_t{1} << 30;
  size_t max_shared_bytes = 0;  // of one block; follows from major and minor
};

EmulatedDevice emulated_device();

// Every function of the API starts with one and ends with the other. An error that begin_call returns (an injected
// fault, a driver too old, no device) is the function's result.
int begin_call(const char* name);
cudaError_t end_call(int error);

bool stream_exists(cudaStream_t stream);

}  // namespace cuda_emulation
