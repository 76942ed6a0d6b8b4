// Which instruction set native code uses: the best this processor runs, or the one that was forced on the process.
#pragma once

#include <optional>

namespace waste {

// Slowest first. Each includes the ones before it.
//   avx2    AVX2, FMA and F16C, which every processor since Haswell and Zen has together
//   avx512  F, BW, DQ, VL, VNNI and VBMI
//   amx     tiles of int8, with the permission of the operating system
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };
constexpr int ISAS = 4;

// Whether this processor, this build and the operating system have it. The first question about amx asks Linux for
// the permission to use tiles; it holds for all threads and is not given back.
bool usable(Isa isa);

// The one to use now: as forced, else the best. One atomic load; may be called from any thread.
Isa active();

// From now on active() is `isa`; nothing: the best again. Work that has begun may finish with the set it began with.
// Throws std::invalid_argument for one that is not usable.
void force(std::optional<Isa> isa);

} // namespace waste
