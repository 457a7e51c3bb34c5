# The CUDA toolkit (NVIDIA's licence; the static runtime may be distributed): nvcc, its headers and libcudart_static of
# the machine that builds. 13.0 is what we build with.
#
# Sets STEPLOOP_HAS_CUDA and defines steploop_cuda_toolkit.
set(STEPLOOP_HAS_CUDA OFF)
if(cuda_choice STREQUAL "OFF" OR STEPLOOP_SANITIZE)
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(cuda_choice STREQUAL "ON")
    message(FATAL_ERROR "STEPLOOP_CUDA=ON: no nvcc found; put it on the PATH, set CUDACXX, or use AUTO or OFF")
  endif()
  message(STATUS "No nvcc: steploop is built without its CUDA backend")
  return()
endif()
if(CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
endif()
set(CMAKE_CUDA_ARCHITECTURES "${STEPLOOP_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
set(STEPLOOP_HAS_CUDA ON)

add_library(steploop_cuda_toolkit INTERFACE)
target_include_directories(steploop_cuda_toolkit SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(steploop_cuda_toolkit INTERFACE CUDA::cudart_static)
target_compile_options(steploop_cuda_toolkit INTERFACE
  # As for C++: a multiply and an add fuse only where the source says so.
  "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-lineinfo>")
