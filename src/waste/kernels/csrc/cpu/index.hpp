// The sparse-selection index of one MLA layer: keys of finished pools, scores, exact top-k.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

#include <cstdint>

namespace waste {

struct IndexWeights {
  const Weight *wq_b;     // (n * d, q_lora)
  const Weight *wk;       // (d, D)
  const Weight *proj;     // (n, D)
  const Weight *gate;     // (d, D); null when pool == 1
  const float *norm;      // (d)
  const float *norm_bias; // (d)
  const float *ape;       // (pool, d); null when pool == 1
  const float *inv_freq;  // (rotary / 2) or null
};

struct IndexDims {
  std::size_t tokens;
  std::size_t dim; // D
  std::size_t q_lora;
  std::size_t heads;
  std::size_t head_dim;
  std::size_t pool;
  std::size_t keep;   // pools
  std::size_t rotary; // channels
  double norm_eps;
};

struct IndexState {
  float *keys;       // (capacity, d)
  float *open_keys;  // (pool, d)
  float *open_gates; // (pool, d)
  std::size_t start; // tokens seen before this chunk
};

// Advances the state by T tokens. With `positions`, writes the attended positions of each query, ascending, to
// positions[offsets[t] .. offsets[t + 1]); offsets are the caller's: min(pools, keep) * pool + tail numbers each.
void index(Pool &pool, const float *x, const float *q_latent, const IndexWeights &w, const IndexDims &dims,
           const IndexState &state, std::int32_t *positions, const std::int64_t *offsets);

// The `keep` <= count largest scores, ties to the lower index, ascending by index: chosen (keep). In linear time, by
// digits. A score that is not a number loses against every number. candidates (count) is scratch.
void choose(const double *score, std::size_t count, std::size_t keep, std::uint64_t *candidates,
            std::int32_t *chosen);

} // namespace waste
