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
  const std::int32_t *arrived; // 0 while its record is read, 1 when it is there, below 0 when it will not come. Others
                               // write to it meanwhile. Null: it is there.
};

// Experts whose records may still be on their way.
struct Experts {
  const Expert *given;
  std::size_t count;
  std::size_t hidden;   // D
  bool (*interrupted)(); // asked now and then while waiting: true ends the wait. Null: nobody to ask.
};

// How it went.
struct Outcome {
  bool whole = true;      // every record has come; otherwise what was computed is of no use
  double stalled_s = 0.0; // while nothing was left to compute until the next one came
};

// Which experts each token chose, and for what share.
struct Choices {
  const std::int32_t *ids; // (T, K)
  const float *weights;    // (T, K)
  std::size_t tokens, top_k;
};

// For each expert given, its output for every token that chose it: out (T, K, D), row (t, k) where ids[t, k] is the
// expert. Other rows stay as they are. Begins with those that are there and takes the others as they arrive.
Outcome experts(Pool &pool, const float *x, const Choices &choices, const Experts &experts, float limit, float *out);

// out (T, D) = sum over k, in order, of weights[t, k] * (expert ids[t, k] of x), + shared x where there is one.
// Returns as `experts`. Throws std::invalid_argument when an expert that was chosen is not given.
Outcome expert_group(Pool &pool, const float *x, const Choices &choices, const Experts &experts, const Mlp *shared,
                  float limit, float *out);

// The last step of expert_group alone: parts (T, K, D) from `experts`, shared (T, D) or null.
void combine(Pool &pool, const float *parts, const Choices &choices, const float *shared, float *out, std::size_t dim);

} // namespace waste
