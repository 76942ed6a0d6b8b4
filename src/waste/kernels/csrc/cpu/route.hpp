// The sigmoid router: scores, choice with a correction bias, normalised weights.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

#include <cstdint>

namespace waste {

struct RouterParams {
  const Weight *gate; // (E, D)
  const float *bias;  // (E): moves the choice, not the weight
  std::size_t top_k;
  std::size_t groups;
  std::size_t topk_groups;
  double scaling;
  bool normalize;
};

// x (T, D) -> ids (T, K), best first, ties to the lower index; weights (T, K).
void route(Pool &pool, const float *x, const RouterParams &params, std::size_t tokens, std::int32_t *ids,
           float *weights);

} // namespace waste
