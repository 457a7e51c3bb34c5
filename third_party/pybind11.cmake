# pybind11 (BSD-3-Clause): from the Python environment that builds; the version is pinned in constraints.txt.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
# Asks the module itself: works with and without scikit-build-core, and nothing stale stays in the cache.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import pybind11; print(pybind11.get_cmake_dir())"
  OUTPUT_VARIABLE pybind11_cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "pybind11 is not installed for ${Python_EXECUTABLE}: pip install -c constraints.txt pybind11")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3.0 CONFIG REQUIRED PATHS "${pybind11_cmake_dir}" NO_DEFAULT_PATH)
