// Kimi delta attention: the whole sublayer for a chunk of tokens, advancing its state.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

namespace waste {

// C = heads * head_dim. Convolution kernels are (C, taps), the last tap on the current token.
struct KdaWeights {
  const Weight *q, *k, *v, *f_a, *f_b, *b, *g_a, *g_b, *o;
  const float *q_conv, *k_conv, *v_conv;
  const float *a_log;   // (heads)
  const float *dt_bias; // (C)
  const float *norm;    // (head_dim)
};

struct KdaDims {
  std::size_t tokens;
  std::size_t dim; // D
  std::size_t heads;
  std::size_t head_dim;
  std::size_t taps;
  bool bounded; // log decay is bound * sigmoid(exp(A) * f), else -exp(A) * softplus(f)
  double bound;
  double norm_eps;
};

struct KdaState {
  float *conv; // (3, taps - 1, C): the last inputs of the q, k, v convolutions, oldest first
  float *s;    // (heads, head_dim key, head_dim value)
};

// x (T, D) -> out (T, D)
void kda(Pool &pool, const float *x, const KdaWeights &w, const KdaDims &dims, const KdaState &state, float *out);

struct DeltaRule {
  const float *q, *k, *v, *decay; // (T, heads, head_dim)
  const float *beta;              // (T, heads)
};

// The heart of it alone, for tests and measurements: for every token and head, s = decay (rows) * s;
// s += outer(k, beta * (v - k @ s)); out (T, heads, head_dim) = q @ s. Of dims: tokens, heads, head_dim.
void delta_rule(Pool &pool, const DeltaRule &r, const KdaDims &dims, float *s, float *out);

} // namespace waste
