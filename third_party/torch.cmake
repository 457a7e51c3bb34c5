# torch (BSD-3-Clause): headers and libtorch_cpu of the Python environment that builds; pinned in constraints.txt.
#
# Only the stable ABI is used, so that one build runs with many torch versions. find_package(Torch) is avoided: it wants
# the CUDA toolkit whenever torch was built with CUDA, and links libraries that we do not need.
execute_process(
  # find_spec does not import torch, which would take seconds.
  COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u; print(next(iter(u.find_spec('torch').submodule_search_locations)))"
  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}: pip install -c constraints.txt torch")
endif()
message(STATUS "Found torch: ${torch_dir}")

add_library(steploop_torch_stable INTERFACE)
target_include_directories(steploop_torch_stable SYSTEM INTERFACE "${torch_dir}/include")
target_link_libraries(steploop_torch_stable INTERFACE
  "${torch_dir}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
target_compile_definitions(steploop_torch_stable INTERFACE
  TORCH_TARGET_VERSION=0x020b000000000000  # 2.11, the oldest torch we run with
  TORCH_STABLE_ONLY)                       # c10 and ATen headers become errors
