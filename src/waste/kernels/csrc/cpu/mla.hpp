// Multi-head latent attention in absorbed form: one cache row of kv_lora + rope numbers per token, for all heads.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

#include <cstdint>

namespace waste {

struct MlaDims {
  std::size_t tokens;
  std::size_t dim; // D
  std::size_t heads;
  std::size_t kv_lora;
  std::size_t nope;
  std::size_t rope;
  std::size_t v;

  std::size_t row() const { return kv_lora + rope; }
};

struct MlaProjection {
  const Weight *q_a; // null: queries straight from the hidden state
  const float *q_a_norm;
  const Weight *q_b;  // (H * (nope + rope), q_lora or D)
  const Weight *kv_a; // (row, D)
  const float *kv_a_norm;
  const Weight *k_up; // (H * kv_lora, nope)
  double latent_eps;
  const float *inv_freq; // (rope / 2); null: the rope channels are not rotated
  std::size_t start;     // position of the first token
};

// x (T, D) -> q (T, H, row), rows (T, row), latent (T, q_lora; ignored without q_a)
void mla_project(Pool &pool, const float *x, const MlaProjection &w, const MlaDims &dims, float *q, float *rows,
                 float *latent);

struct MlaAttention {
  const float *cache; // (>= start + T, row)
  std::size_t start;
  const std::int32_t *positions; // attended rows of query t: positions[offsets[t] .. offsets[t + 1]); null: causal
  const std::int64_t *offsets;
  const Weight *v_up; // (H * v, kv_lora)
  const Weight *o;    // (D, H * v)
  double scale;
};

// q (T, H, row) -> out (T, D)
void mla_attend(Pool &pool, const float *q, const MlaAttention &w, const MlaDims &dims, float *out);

} // namespace waste
