// SwiGLU feed-forwards: one dense MLP for all tokens, or several experts for the tokens that chose them.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

#include <cstdint>

namespace waste {

struct Mlp {
  Weight gate, up; // (F, D)
  Weight down;     // (D, F)
};

// out (T, D) = down(silu(min(gate x, limit)) * clamp(up x, -limit, limit)). limit may be infinite.
void mlp(Pool &pool, const float *x, const Mlp &w, float limit, float *out, std::size_t tokens);

struct Expert {
  std::int32_t id;
  Mlp w;
};

// For each expert given, its output for every token that chose it: out (T, K, D), row (t, k) where
// ids (T, K)[t, k] is the expert. Other rows stay as they are.
void experts(Pool &pool, const float *x, const std::int32_t *ids, const Expert *given, std::size_t count,
             float limit, float *out, std::size_t tokens, std::size_t top_k);

} // namespace waste
