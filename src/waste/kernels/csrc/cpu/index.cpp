// Index keys (LayerNorm, rotation, pooling) and the choice of pools each query attends to.
#include "index.hpp"

#include "heads.hpp"
#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "simd.hpp"
#include "vector.hpp"

#include <algorithm>
#include <bit>
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

// A number whose order as an integer is that of the scores: zeros are equal, what is not a number comes last.
std::uint64_t rank(double score) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63, infinity = std::uint64_t{0x7ff} << 52;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(score), size = bits & ~sign;
  // Without a branch on the sign, which nobody can predict: a negative number has all its bits turned over.
  const std::uint64_t order = bits ^ (static_cast<std::uint64_t>(static_cast<std::int64_t>(bits) >> 63) | sign);
  return size > infinity ? 0 : size == 0 ? sign : order;
}

constexpr int DIGIT = 11; // bits: 8 KiB of counters

} // namespace

void choose(const double *score, std::size_t count, std::size_t keep, std::uint64_t *candidates,
            std::int32_t *chosen) {
  if (keep == 0) {
    return;
  }
  // Digit by digit, from the highest, towards the rank of the last one taken. Candidates share all digits so far.
  std::uint64_t last = 0;
  std::size_t found = count, left = keep; // candidates, and how many of them are taken
  std::size_t equal = count;              // taken of those that equal the last
  for (int shift = 64; shift > 0 && keep < count;) {
    const int width = std::min(DIGIT, shift);
    const std::uint64_t digits = (std::uint64_t{1} << width) - 1;
    const bool fresh = shift == 64;
    shift -= width;
    std::uint32_t counts[1 << DIGIT] = {};
    for (std::size_t j = 0; j < found; ++j) {
      ++counts[(fresh ? rank(score[j]) : candidates[j]) >> shift & digits];
    }
    std::uint64_t digit = digits;
    for (; counts[digit] < left; --digit) {
      left -= counts[digit];
    }
    last |= digit << shift;
    if (counts[digit] == left) {
      break; // all of them are taken: every rank from here up
    }
    if (shift == 0) {
      equal = left;
      break;
    }
    std::size_t kept = 0;
    for (std::size_t j = 0; j < found; ++j) {
      const std::uint64_t candidate = fresh ? rank(score[j]) : candidates[j];
      candidates[kept] = candidate;
      kept += (candidate >> shift & digits) == digit ? 1 : 0;
    }
    found = kept;
  }
  for (std::size_t j = 0; j < count; ++j) {
    const std::uint64_t found_rank = rank(score[j]);
    if (found_rank > last || (found_rank == last && equal > 0)) {
      equal -= found_rank == last ? 1 : 0;
      *chosen++ = static_cast<std::int32_t>(j);
    }
  }
}

namespace {

constexpr std::size_t SCORE_RUN = 384; // pools an item scores
constexpr std::size_t SCORE_MEMORY = std::size_t{1} << 20; // scores held at a time

// What a few queries need, and each thread.
struct Buffers {
  float *q;                  // (queries, d, wide): heads in lanes
  float *weights;            // (queries, wide)
  double *scores;            // (queries, most)
  float *likeness;           // (threads, ATTENTION_ROWS, wide)
  std::uint64_t *candidates; // (threads, most)
  std::int32_t *chosen;      // (threads, most kept)
  std::size_t most;          // pools of any query
};

// Writes the positions of queries t0 .. t0 + n - 1.
void select(Stage &stage, const float *q, const float *head_weights, const IndexDims &d, const IndexState &state,
            std::size_t t0, std::size_t n, const Buffers &b, std::int32_t *positions, const std::int64_t *offsets) {
  const std::size_t runs = ceil_div(b.most, SCORE_RUN), wide = ceil_div(d.heads, LANES) * LANES, dim = d.head_dim;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  const auto pools_of = [&](std::size_t i) { return (state.start + t0 + i + 1) / d.pool; };
  if (pools_of(n - 1) > d.keep) {
    const auto scores = lanes().index.scores;
    stage.parallel(n, n * d.heads * dim * 4, [&](std::size_t i, std::size_t) {
      heads_in_lanes(q + (t0 + i) * d.heads * dim, d.heads, wide, dim, scale, b.q + i * dim * wide);
      std::fill_n(b.weights + i * wide, wide, 0.0f);
      std::copy_n(head_weights + (t0 + i) * d.heads, d.heads, b.weights + i * wide);
    });
    stage.parallel(n * runs, n * b.most * d.heads * dim, [&](std::size_t item, std::size_t worker) {
      const std::size_t i = item / runs, begin = item % runs * SCORE_RUN;
      const std::size_t pools = pools_of(i), end = std::min(pools, begin + SCORE_RUN);
      if (pools > d.keep && begin < end) {
        scores(b.q + i * dim * wide, b.weights + i * wide, state.keys, begin, end, wide, dim,
                     b.likeness + worker * ATTENTION_ROWS * wide, b.scores + i * b.most);
      }
    });
  }
  stage.parallel(n, n * b.most * 4, [&](std::size_t i, std::size_t worker) {
    const std::size_t pools = pools_of(i), kept = std::min(pools, d.keep);
    std::int32_t *chosen = b.chosen + worker * std::min(b.most, d.keep);
    if (kept < pools) {
      choose(b.scores + i * b.most, pools, kept, b.candidates + worker * b.most, chosen);
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
  const std::size_t across = ceil_div(n, LANES) * LANES, threads = stage.threads();
  Buffers b{};
  b.q = stage.floats(at_once * dim * across);
  b.weights = stage.floats(at_once * across);
  b.scores = stage.array<double>(at_once * most);
  b.likeness = stage.floats(threads * ATTENTION_ROWS * across);
  b.candidates = stage.array<std::uint64_t>(threads * most);
  b.chosen = stage.array<std::int32_t>(threads * std::min(most, d.keep));
  b.most = most;
  for (std::size_t t0 = 0; t0 < t; t0 += at_once) {
    select(stage, q, head_weights, d, state, t0, std::min(at_once, t - t0), b, positions, offsets);
  }
}

} // namespace waste
