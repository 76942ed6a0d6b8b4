// Encoding of matrices in the rotated formats: strips in parallel, by the fastest code this processor runs.
#pragma once

#include "encode_job.hpp"
#include "pool.hpp"
#include "weight.hpp"

namespace waste {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// Whether this processor, and the build, have it. avx512 stands for F, BW, DQ, VL, VNNI and VBMI.
bool usable(Isa isa);

// w (rows, cols) row-major -> out, all strips. The bytes depend neither on the pool nor on `isa`.
// Throws std::invalid_argument for other formats and an instruction set that is not usable.
EncodeLoss encode(Pool &pool, const float *w, Format format, std::size_t rows, std::size_t cols,
                  const float *importance, Isa isa, std::uint8_t *out);

} // namespace waste
