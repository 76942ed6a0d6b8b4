// Which products with inputs of 8 bits the instruction set in use has.
#include "int8.hpp"

#include "isa.hpp"

namespace waste {

const Int8Kernels &int8_kernels() {
#if defined(WASTE_X86)
  switch (active()) {
  case Isa::amx:
    return INT8_AMX;
  case Isa::avx512:
    return INT8_AVX512;
  case Isa::avx2:
    return INT8_AVX2;
  case Isa::portable:
    break;
  }
#endif
  return INT8_PORTABLE;
}

} // namespace waste
