// The tables of one instruction set, together.
#include "lanes.hpp"

namespace waste::WASTE_ISA {

extern const Lanes LANES;
const Lanes LANES = {Isa::WASTE_ISA, VECTOR, STREAMS, ROWS, INPUT, DECODE, KDA, MLA, INDEX};

} // namespace waste::WASTE_ISA
