// Routing in the release's precision: logits accumulated in float64, scores and choices in float32.
#include "route.hpp"

#include "linear.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace waste {

namespace {

// Order by value, larger first, ties to the lower index.
struct Better {
  const float *value;
  bool operator()(std::int32_t a, std::int32_t b) const {
    return value[a] != value[b] ? value[a] > value[b] : a < b;
  }
};

// Experts outside the topk_groups best groups cannot be chosen; a group counts as its two best choices.
void keep_groups(float *choice, std::size_t experts, const RouterParams &p, float *value, std::int32_t *order) {
  const std::size_t size = experts / p.groups;
  for (std::size_t g = 0; g < p.groups; ++g) {
    float best = -HUGE_VALF, second = -HUGE_VALF;
    for (std::size_t e = g * size; e < (g + 1) * size; ++e) {
      if (choice[e] > best) {
        second = best;
        best = choice[e];
      } else {
        second = std::max(second, choice[e]);
      }
    }
    value[g] = size > 1 ? best + second : best;
  }
  std::iota(order, order + p.groups, 0);
  std::sort(order, order + p.groups, Better{value});
  for (std::size_t i = p.topk_groups; i < p.groups; ++i) {
    const std::size_t g = static_cast<std::size_t>(order[i]);
    std::fill(choice + g * size, choice + (g + 1) * size, -HUGE_VALF);
  }
}

} // namespace

void route(Pool &pool, const float *x, const RouterParams &params, std::size_t tokens, std::int32_t *ids,
           float *weights) {
  Stage stage(pool);
  const std::size_t experts = params.gate->rows, cols = params.gate->cols, k = params.top_k;
  double *logits = stage.array<double>(tokens * experts);
  float *score = stage.floats(tokens * experts), *choice = stage.floats(tokens * experts);
  float *value = stage.floats(tokens * params.groups);
  std::int32_t *order = stage.array<std::int32_t>(tokens * experts);
  multiply_f64(stage, *params.gate, rows_of(stage, x, cols, tokens), rows_of(stage, logits, experts, tokens),
               tokens);
  stage.parallel(tokens, tokens * experts * 16, [&](std::size_t t, std::size_t) {
    float *s = score + t * experts, *c = choice + t * experts;
    std::int32_t *o = order + t * experts;
    for (std::size_t e = 0; e < experts; ++e) {
      s[e] = static_cast<float>(1.0 / (1.0 + std::exp(-logits[t * experts + e])));
      const float moved = s[e] + params.bias[e];
      c[e] = moved == moved ? moved : -HUGE_VALF; // what is not a number is chosen last
    }
    if (params.topk_groups < params.groups) {
      keep_groups(c, experts, params, value + t * params.groups, o);
    }
    std::iota(o, o + experts, 0);
    std::partial_sort(o, o + k, o + experts, Better{c});
    double total = 1e-20;
    for (std::size_t i = 0; i < k; ++i) {
      ids[t * k + i] = o[i];
      total += s[o[i]];
    }
    const double share = params.normalize ? params.scaling / total : params.scaling;
    for (std::size_t i = 0; i < k; ++i) {
      weights[t * k + i] = static_cast<float>(s[o[i]] * share);
    }
  });
}

} // namespace waste
