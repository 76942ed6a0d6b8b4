// Which tables the process uses.
#include "lanes.hpp"

namespace waste {

namespace portable {
extern const Lanes LANES;
}
#if defined(WASTE_X86)
namespace avx2 {
extern const Lanes LANES;
}
namespace avx512 {
extern const Lanes LANES;
}
#endif

const Lanes &lanes() {
#if defined(WASTE_X86)
  switch (active()) {
  case Isa::portable:
    return portable::LANES;
  case Isa::avx2:
    return avx2::LANES;
  case Isa::avx512:
  case Isa::amx: // tiles multiply int8 only
    return avx512::LANES;
  }
#endif
  return portable::LANES;
}

} // namespace waste
