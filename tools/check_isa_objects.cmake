# Fails the build when an object compiled for one instruction set defines a shared inline function.
#
# The linker keeps one copy of such a function for the whole program. Were it the copy from here, every caller would run
# it, on machines that lack the instructions too. Symbols within the instruction set's own namespace are fine.
# cmake -DNM=nm -DISA=avx512 -DOBJECTS=a.o;b.o -P check_isa_objects.cmake
string(LENGTH "${ISA}" length)
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  # W, V, u: weak functions, weak data, unique globals.
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
  list(FILTER shared EXCLUDE REGEX "${length}${ISA}")
  if(shared)
    list(JOIN shared "\n  " lines)
    message(FATAL_ERROR
      "${object} defines functions outside namespace ${ISA}, which other code would share:\n  ${lines}")
  endif()
endforeach()
