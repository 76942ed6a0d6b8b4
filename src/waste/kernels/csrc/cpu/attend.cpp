// MLA attention over the cache: scores, softmax and mix per query and head, then the two output projections.
//
// Memory is linear in the context: a score per attended row for each thread, and a chunk of mixed latents.
#include "mla.hpp"

#include "linear.hpp"
#include "simd.hpp"

#include <algorithm>
#include <cmath>

namespace waste {

namespace {

// Heads that share a pass over the cache rows. Each keeps its own sums, so grouping changes no bits.
constexpr std::size_t HEADS = 4;

template <std::size_t N>
WASTE_INLINE void scores_of(const float *const *q, const float *cache, const std::int32_t *positions,
                            std::size_t count, std::size_t row, float scale, float *const *score) {
  const std::size_t whole = row / LANES * LANES;
  for (std::size_t j = 0; j < count; ++j) {
    const float *key = cache + (positions != nullptr ? static_cast<std::size_t>(positions[j]) : j) * row;
    f32x16 acc[N]{};
    for (std::size_t r = 0; r < whole; r += LANES) {
      const f32x16 k = load<f32x16>(key + r);
      for (std::size_t h = 0; h < N; ++h) {
        acc[h] += load<f32x16>(q[h] + r) * k;
      }
    }
    if (whole < row) {
      const f32x16 k = load_part(key + whole, row - whole);
      for (std::size_t h = 0; h < N; ++h) {
        acc[h] += load_part(q[h] + whole, row - whole) * k;
      }
    }
    for (std::size_t h = 0; h < N; ++h) {
      score[h][j] = sum(acc[h]) * scale;
    }
  }
}

// mixed[h] = sum over j, in order, of p[h][j] * cache row (its first `width` numbers). Rows are taken in blocks that
// stay in the second-level cache while all columns pass over them.
template <std::size_t N>
WASTE_INLINE void mix_of(float *const *p, const float *cache, const std::int32_t *positions, std::size_t count,
                         std::size_t row, std::size_t width, float *const *mixed) {
  constexpr std::size_t block = 64;
  for (std::size_t h = 0; h < N; ++h) {
    std::fill(mixed[h], mixed[h] + width, 0.0f);
  }
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t end = std::min(count, begin + block);
    for (std::size_t at = 0; at < width; at += LANES) {
      const std::size_t lanes = std::min(LANES, width - at);
      f32x16 acc[N];
      for (std::size_t h = 0; h < N; ++h) {
        acc[h] = load_part(mixed[h] + at, lanes);
      }
      for (std::size_t j = begin; j < end; ++j) {
        const float *value = cache + (positions != nullptr ? static_cast<std::size_t>(positions[j]) : j) * row + at;
        const f32x16 v = load_part(value, lanes);
        for (std::size_t h = 0; h < N; ++h) {
          acc[h] += v * p[h][j];
        }
      }
      for (std::size_t h = 0; h < N; ++h) {
        store_part(mixed[h] + at, acc[h], lanes);
      }
    }
  }
}

} // namespace

// In place; float32 values, their sum in float64.
WASTE_CLONES void mla_softmax(float *score, std::size_t count) {
  float top = -__builtin_inff();
  for (std::size_t j = 0; j < count; ++j) {
    top = score[j] > top ? score[j] : top;
  }
  f64x8 low{}, high{};
  for (std::size_t j = 0; j < count; j += LANES) {
    const std::size_t n = std::min(LANES, count - j);
    float part[LANES] = {};
    store_part(part, exp(load_part(score + j, n) - top), n);
    low += widen(part);
    high += widen(part + 8);
    store_part(score + j, load<f32x16>(part), n);
  }
  const float share = static_cast<float>(1.0 / sum(low + high));
  for (std::size_t j = 0; j < count; ++j) {
    score[j] *= share;
  }
}

WASTE_CLONES void mla_scores(const float *const *q, std::size_t heads, const float *cache,
                             const std::int32_t *positions, std::size_t count, std::size_t row, float scale,
                             float *const *score) {
  if (heads == HEADS) {
    return scores_of<HEADS>(q, cache, positions, count, row, scale, score);
  }
  for (std::size_t h = 0; h < heads; ++h) {
    scores_of<1>(q + h, cache, positions, count, row, scale, score + h);
  }
}

WASTE_CLONES void mla_mix(float *const *p, std::size_t heads, const float *cache, const std::int32_t *positions,
                          std::size_t count, std::size_t row, std::size_t width, float *const *mixed) {
  if (heads == HEADS) {
    return mix_of<HEADS>(p, cache, positions, count, row, width, mixed);
  }
  for (std::size_t h = 0; h < heads; ++h) {
    mix_of<1>(p + h, cache, positions, count, row, width, mixed + h);
  }
}

namespace {

struct Buffers {
  float *scores;       // (threads, HEADS, longest)
  std::size_t longest; // attended rows of any query
  float *mixed;        // (chunk, H, kv_lora)
  float *values;       // (chunk, H * v)
  Product *heads;      // (H)
};

void chunk(Stage &stage, const float *q, const MlaAttention &w, const MlaDims &d, const Buffers &b, float *out) {
  const std::size_t t = d.tokens, row = d.row(), runs = ceil_div(d.heads, HEADS);
  const auto attended = [&](std::size_t i) {
    return w.positions == nullptr ? w.start + i + 1 : static_cast<std::size_t>(w.offsets[i + 1] - w.offsets[i]);
  };
  std::size_t work = 0;
  for (std::size_t i = 0; i < t; ++i) {
    work += attended(i) * d.heads * (row + d.kv_lora);
  }
  stage.parallel(t * runs, work, [&](std::size_t item, std::size_t worker) {
    const std::size_t i = item / runs, head = item % runs * HEADS, n = std::min(HEADS, d.heads - head);
    const std::int32_t *positions = w.positions == nullptr ? nullptr : w.positions + w.offsets[i];
    const std::size_t count = attended(i);
    const float *queries[HEADS] = {};
    float *scores[HEADS] = {}, *mixed[HEADS] = {};
    for (std::size_t h = 0; h < n; ++h) {
      queries[h] = q + (i * d.heads + head + h) * row;
      scores[h] = b.scores + (worker * HEADS + h) * b.longest;
      mixed[h] = b.mixed + (i * d.heads + head + h) * d.kv_lora;
    }
    mla_scores(queries, n, w.cache, positions, count, row, static_cast<float>(w.scale), scores);
    for (std::size_t h = 0; h < n; ++h) {
      mla_softmax(scores[h], count);
    }
    mla_mix(scores, n, w.cache, positions, count, row, d.kv_lora, mixed);
  });
  for (std::size_t h = 0; h < d.heads; ++h) {
    b.heads[h] = Product{w.v_up,
                         rows_of<const float>(stage, b.mixed + h * d.kv_lora, d.heads * d.kv_lora, t),
                         rows_of(stage, b.values + h * d.v, d.heads * d.v, t),
                         t,
                         h * d.v,
                         (h + 1) * d.v};
  }
  multiply(stage, {b.heads, d.heads});
  const Product last =
      product(*w.o, rows_of<const float>(stage, b.values, d.heads * d.v, t), rows_of(stage, out, d.dim, t), t);
  multiply(stage, {&last, 1});
}

} // namespace

void mla_attend(Pool &pool, const float *q, const MlaAttention &w, const MlaDims &dims, float *out) {
  Stage stage(pool);
  const std::size_t most = std::min(dims.tokens, TOKENS);
  Buffers b{};
  for (std::size_t i = 0; i < dims.tokens && w.positions != nullptr; ++i) {
    b.longest = std::max(b.longest, static_cast<std::size_t>(w.offsets[i + 1] - w.offsets[i]));
  }
  if (w.positions == nullptr) {
    b.longest = w.start + dims.tokens;
  }
  b.scores = stage.floats(stage.threads() * HEADS * b.longest);
  b.mixed = stage.floats(most * dims.heads * dims.kv_lora);
  b.values = stage.floats(most * dims.heads * dims.v);
  b.heads = stage.array<Product>(dims.heads);
  for (std::size_t t = 0; t < dims.tokens; t += TOKENS) {
    MlaDims part = dims;
    part.tokens = std::min(TOKENS, dims.tokens - t);
    MlaAttention at = w;
    at.start = w.start + t;
    at.offsets = w.positions == nullptr ? nullptr : w.offsets + t;
    chunk(stage, q + t * dims.heads * dims.row(), at, part, b, out + t * dims.dim);
  }
}

} // namespace waste
