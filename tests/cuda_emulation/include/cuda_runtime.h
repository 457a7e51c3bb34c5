// Stand-in for CUDA's header of the same name: kernel sources that include it compile with a plain C++ compiler and run
// on the host, every CUDA thread as a fiber (see cuda_emulation.h).
#pragma once

#define STEPLOOP_CUDA_EMULATION 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include "cuda_emulation.h"
#include "device_functions.h"
