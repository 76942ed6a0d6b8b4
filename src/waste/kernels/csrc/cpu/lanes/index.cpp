// Scores of the sparse-selection index: one query against the keys of finished pools.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

// Products in float32 lanes, the sum over heads in float64.
void scores(const float *q, const float *weight, const float *keys, std::size_t begin, std::size_t end,
            std::size_t heads, std::size_t d, float scale, double *score) {
  const std::size_t whole = d / LANES * LANES;
  for (std::size_t j = begin; j < end; ++j) {
    const float *key = keys + j * d;
    double total = 0;
    for (std::size_t h = 0; h < heads; ++h) {
      const float *query = q + h * d;
      Floats acc[PARTS]{};
      for (std::size_t c = 0; c < whole; c += LANES) {
        for (std::size_t p = 0; p < PARTS; ++p) {
          acc[p] += floats(query + c + p * FLOATS) * floats(key + c + p * FLOATS);
        }
      }
      if (whole < d) {
        const Rest<float> a(query, whole, d), b(key, whole, d);
        for (std::size_t p = 0; p < PARTS; ++p) {
          acc[p] += floats(a.of + p * FLOATS) * floats(b.of + p * FLOATS);
        }
      }
      const float likeness = sum(acc) * scale;
      total += static_cast<double>(weight[h]) * (likeness > 0.0f ? likeness : 0.0f);
    }
    score[j] = total;
  }
}

} // namespace

const IndexLanes INDEX = {scores};

} // namespace waste::WASTE_ISA
