# Fails when a file compiled for one instruction set gives the linker more than its tables and entry points.
#
# An inline function that such a file does not inline becomes a weak symbol; the linker keeps one copy for everybody,
# and with the copy for AVX-512 every other processor dies of an illegal instruction.
#
#   cmake -DNM=nm -DOBJECTS=a.o:b.o -P check_symbols.cmake
string(REPLACE ":" ";" objects "${OBJECTS}")
foreach(object IN LISTS objects)
  execute_process(
    COMMAND "${NM}" -C -g --defined-only "${object}"
    OUTPUT_VARIABLE listing
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE ";" "," listing "${listing}")
  string(REPLACE "\n" ";" lines "${listing}")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES " [DR] waste::(portable|avx2|avx512)::[A-Z]+$"
       AND NOT line MATCHES " [DR] waste::INT8_[A-Z0-9]+$"
       AND NOT line MATCHES " T waste::encode_strip_[a-z0-9]+\\(waste::EncodeJob const&\\)$")
      message(FATAL_ERROR "${object} defines more than its tables: ${line}")
    endif()
  endforeach()
endforeach()
