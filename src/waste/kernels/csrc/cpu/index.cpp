// Index keys (LayerNorm, rotation, pooling) and the choice of pools each query attends to.
#include "index.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "vector.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace waste {

namespace {

void layer_norm(float *x, const float *weight, const float *bias, std::size_t n, double eps) {
  double mean = 0, variance = 0;
  for (std::size_t i = 0; i < n; ++i) {
    mean += x[i];
  }
  mean /= static_cast<double>(n);
  for (std::size_t i = 0; i < n; ++i) {
    variance += (x[i] - mean) * (x[i] - mean);
  }
  const double inverse = 1.0 / std::sqrt(variance / static_cast<double>(n) + eps);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>((x[i] - mean) * inverse * weight[i] + bias[i]);
  }
}

// key (d) = per channel, the softmax over the pool's gates (+ ape) applied to its keys.
void close_pool(const float *keys, const float *gates, const float *ape, std::size_t pool, std::size_t d,
                float *key) {
  for (std::size_t c = 0; c < d; ++c) {
    double top = -HUGE_VAL, total = 0, value = 0;
    for (std::size_t u = 0; u < pool; ++u) {
      top = std::max(top, static_cast<double>(gates[u * d + c]) + ape[u * d + c]);
    }
    for (std::size_t u = 0; u < pool; ++u) {
      const double share = std::exp(static_cast<double>(gates[u * d + c]) + ape[u * d + c] - top);
      total += share;
      value += share * keys[u * d + c];
    }
    key[c] = static_cast<float>(value / total);
  }
}

// The `keep` largest scores of `count`, ties to the lower index, ascending by index: chosen (keep).
// order (count) is scratch. A score that is not a number loses against every number.
void choose(double *score, std::size_t count, std::size_t keep, std::int32_t *order) {
  for (std::size_t j = 0; j < count; ++j) {
    score[j] = score[j] == score[j] ? score[j] : -HUGE_VAL;
  }
  std::iota(order, order + count, 0);
  if (keep < count) {
    std::nth_element(order, order + keep, order + count, [score](std::int32_t a, std::int32_t b) {
      return score[a] != score[b] ? score[a] > score[b] : a < b;
    });
    std::sort(order, order + keep);
  }
}

constexpr std::size_t SCORE_RUN = 128;              // pools an item scores
constexpr std::size_t SCORE_MEMORY = std::size_t{1} << 20; // scores held at a time

// Writes the positions of queries t0 .. t0 + n - 1.
void select(Stage &stage, const float *q, const float *head_weights, const IndexDims &d, const IndexState &state,
            std::size_t t0, std::size_t n, double *scores, std::int32_t *order, std::size_t most,
            std::int32_t *positions, const std::int64_t *offsets) {
  const std::size_t runs = ceil_div(most, SCORE_RUN);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d.head_dim)));
  const IndexLanes &loops = lanes().index;
  const auto pools_of = [&](std::size_t i) { return (state.start + t0 + i + 1) / d.pool; };
  stage.parallel(n * runs, n * most * d.heads * d.head_dim, [&](std::size_t item, std::size_t) {
    const std::size_t i = item / runs, begin = item % runs * SCORE_RUN;
    const std::size_t pools = pools_of(i), end = std::min(pools, begin + SCORE_RUN);
    if (pools > d.keep && begin < end) {
      loops.scores(q + (t0 + i) * d.heads * d.head_dim, head_weights + (t0 + i) * d.heads, state.keys, begin, end,
                   d.heads, d.head_dim, scale, scores + i * most);
    }
  });
  stage.parallel(n, n * most * 4, [&](std::size_t i, std::size_t) {
    const std::size_t pools = pools_of(i), kept = std::min(pools, d.keep);
    std::int32_t *chosen = order + i * most;
    if (kept < pools) {
      choose(scores + i * most, pools, kept, chosen);
    } else {
      std::iota(chosen, chosen + pools, 0);
    }
    std::int32_t *to = positions + offsets[t0 + i];
    for (std::size_t j = 0; j < kept; ++j) {
      for (std::size_t u = 0; u < d.pool; ++u) {
        *to++ = chosen[j] * static_cast<std::int32_t>(d.pool) + static_cast<std::int32_t>(u);
      }
    }
    for (std::size_t p = pools * d.pool; p <= state.start + t0 + i; ++p) { // the tail: tokens of the open pool
      *to++ = static_cast<std::int32_t>(p);
    }
  });
}

} // namespace

void index(Pool &pool, const float *x, const float *q_latent, const IndexWeights &w, const IndexDims &d,
           const IndexState &state, std::int32_t *positions, const std::int64_t *offsets) {
  Stage stage(pool);
  const std::size_t t = d.tokens, n = d.heads, dim = d.head_dim, wide = n * dim;
  float *q = stage.floats(t * wide), *k = stage.floats(t * dim), *head_weights = stage.floats(t * n);
  float *gates = stage.floats(t * dim);
  const float *const *rows = rows_of(stage, x, d.dim, t);
  Product products[4] = {product(*w.wk, rows, rows_of(stage, k, dim, t), t)};
  std::size_t count = 1;
  if (w.gate != nullptr) {
    products[count++] = product(*w.gate, rows, rows_of(stage, gates, dim, t), t);
  }
  if (positions != nullptr) {
    products[count++] = product(*w.proj, rows, rows_of(stage, head_weights, n, t), t);
    products[count++] = product(*w.wq_b, rows_of(stage, q_latent, d.q_lora, t), rows_of(stage, q, wide, t), t);
  }
  multiply(stage, {products, count});

  const float head_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  stage.parallel(t, t * (wide + 4 * dim), [&](std::size_t i, std::size_t) {
    layer_norm(k + i * dim, w.norm, w.norm_bias, dim, d.norm_eps);
    if (w.inv_freq != nullptr) {
      rotate(k + i * dim, d.rotary, state.start + i, w.inv_freq);
    }
    if (positions != nullptr) {
      scale(head_weights + i * n, n, head_scale);
      for (std::size_t h = 0; h < n && w.inv_freq != nullptr; ++h) {
        rotate(q + i * wide + h * dim, d.rotary, state.start + i, w.inv_freq);
      }
    }
  });

  for (std::size_t i = 0; i < t; ++i) {
    const std::size_t position = state.start + i, slot = position % d.pool;
    if (w.gate == nullptr) {
      std::copy_n(k + i * dim, dim, state.keys + position * dim);
      continue;
    }
    std::copy_n(k + i * dim, dim, state.open_keys + slot * dim);
    std::copy_n(gates + i * dim, dim, state.open_gates + slot * dim);
    if (slot + 1 == d.pool) {
      close_pool(state.open_keys, state.open_gates, w.ape, d.pool, dim, state.keys + position / d.pool * dim);
    }
  }
  if (positions == nullptr) {
    return;
  }

  const std::size_t most = std::max<std::size_t>(1, (state.start + t) / d.pool);
  const std::size_t at_once = std::max<std::size_t>(1, std::min({SCORE_MEMORY / most, t, TOKENS}));
  double *scores = stage.array<double>(at_once * most);
  std::int32_t *order = stage.array<std::int32_t>(at_once * most);
  for (std::size_t t0 = 0; t0 < t; t0 += at_once) {
    select(stage, q, head_weights, d, state, t0, std::min(at_once, t - t0), scores, order, most, positions, offsets);
  }
}

} // namespace waste
