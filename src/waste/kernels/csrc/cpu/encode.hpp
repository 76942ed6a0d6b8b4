// Encoding of matrices in the rotated formats: strips in parallel, by the fastest code this processor runs.
#pragma once

#include "encode_job.hpp"
#include "isa.hpp"
#include "pool.hpp"
#include "weight.hpp"

namespace waste {

// w (rows, cols) row-major -> out, all strips. The bytes depend neither on the pool nor on `isa`.
// Throws std::invalid_argument for other formats and an instruction set that is not usable.
EncodeLoss encode(Pool &pool, const float *w, Format format, std::size_t rows, std::size_t cols,
                  const float *importance, Isa isa, std::uint8_t *out);

} // namespace waste
