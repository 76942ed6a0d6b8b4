// Scores of the sparse-selection index: one query against the keys of finished pools.
#include "lanes.hpp"

#include "tile.hpp"

namespace waste::WASTE_ISA {

namespace {

// Products in float32, the sum over heads in float64.
void score_pools(const float *q, const float *weight, const float *keys, std::size_t begin, std::size_t end,
                 std::size_t wide, std::size_t d, float *likeness, double *score) {
  const float *rows[ATTENTION_ROWS];
  for (std::size_t first = begin; first < end; first += ATTENTION_ROWS) {
    const std::size_t count = end - first < ATTENTION_ROWS ? end - first : ATTENTION_ROWS;
    for (std::size_t j = 0; j < count; ++j) {
      rows[j] = keys + (first + j) * d;
    }
    // Not fused: what is chosen must not depend on the instruction set.
    scores<false>(q, wide, d, rows, count, likeness);
    for (std::size_t j = 0; j < count; ++j) {
      Doubles total[WIDE_PARTS]{};
      for (std::size_t h = 0; h < wide; h += LANES) {
        for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
          const Doubles like = doubles(likeness + j * wide + h + p * DOUBLES);
          total[p] += (like > 0.0 ? like : Doubles{}) * doubles(weight + h + p * DOUBLES);
        }
      }
      score[first + j] = sum(total);
    }
  }
}

} // namespace

const IndexLanes INDEX = {score_pools};

} // namespace waste::WASTE_ISA
