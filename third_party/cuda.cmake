# The CUDA toolkit (NVIDIA's licence; the static runtime may be distributed): nvcc, its headers and libcudart_static of
# the machine that builds. 13.0 is what we build with.
#
# Sets STEPLOOP_HAS_CUDA and defines steploop_cuda_toolkit.
set(STEPLOOP_HAS_CUDA OFF)
if(cuda_choice STREQUAL "ON" AND STEPLOOP_SANITIZE)
  message(FATAL_ERROR "STEPLOOP_CUDA=ON: the CUDA backend cannot be built with STEPLOOP_SANITIZE; use AUTO or OFF")
endif()
if(cuda_choice STREQUAL "OFF" OR STEPLOOP_SANITIZE)
  return()
endif()

# Ends the attempt: an error where CUDA was asked for, else a build without it.
macro(steploop_no_cuda reason)
  if(cuda_choice STREQUAL "ON")
    message(FATAL_ERROR "STEPLOOP_CUDA=ON: ${reason}")
  endif()
  message(STATUS "steploop is built without its CUDA backend: ${reason}")
  return()
endmacro()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  steploop_no_cuda("no nvcc found; put it on the PATH or set CUDACXX")
endif()
if(CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
endif()
set(CMAKE_CUDA_ARCHITECTURES "${STEPLOOP_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  steploop_no_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} has no C++20; 12.0 or later does")
endif()
find_package(CUDAToolkit QUIET)
if(NOT TARGET CUDA::cudart_static)
  steploop_no_cuda("the toolkit of ${CMAKE_CUDA_COMPILER} lacks its headers or libcudart_static")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(STEPLOOP_HAS_CUDA ON)

add_library(steploop_cuda_toolkit INTERFACE)
target_include_directories(steploop_cuda_toolkit SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(steploop_cuda_toolkit INTERFACE CUDA::cudart_static)
target_compile_options(steploop_cuda_toolkit INTERFACE
  # As for C++: a multiply and an add fuse only where the source says so.
  "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-lineinfo>")
