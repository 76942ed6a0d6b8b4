// MLA attention over the cache: scores, softmax and mix per query and head, then the two output projections.
//
// Memory is linear in the context: a score per attended row for each thread, and a chunk of mixed latents.
#include "mla.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"

#include <algorithm>
#include <cmath>

namespace waste {

namespace {

struct Buffers {
  float *scores;       // (threads, MLA_HEADS, longest)
  std::size_t longest; // attended rows of any query
  float *mixed;        // (chunk, H, kv_lora)
  float *values;       // (chunk, H * v)
  Product *heads;      // (H)
};

void chunk(Stage &stage, const float *q, const MlaAttention &w, const MlaDims &d, const Buffers &b, float *out) {
  const std::size_t t = d.tokens, row = d.row(), runs = ceil_div(d.heads, MLA_HEADS);
  const auto attended = [&](std::size_t i) {
    return w.positions == nullptr ? w.start + i + 1 : static_cast<std::size_t>(w.offsets[i + 1] - w.offsets[i]);
  };
  std::size_t work = 0;
  for (std::size_t i = 0; i < t; ++i) {
    work += attended(i) * d.heads * (row + d.kv_lora);
  }
  const MlaLanes &loops = lanes().mla;
  stage.parallel(t * runs, work, [&](std::size_t item, std::size_t worker) {
    const std::size_t i = item / runs, head = item % runs * MLA_HEADS, n = std::min(MLA_HEADS, d.heads - head);
    const std::int32_t *positions = w.positions == nullptr ? nullptr : w.positions + w.offsets[i];
    const std::size_t count = attended(i);
    const float *queries[MLA_HEADS] = {};
    float *scores[MLA_HEADS] = {}, *mixed[MLA_HEADS] = {};
    for (std::size_t h = 0; h < n; ++h) {
      queries[h] = q + (i * d.heads + head + h) * row;
      scores[h] = b.scores + (worker * MLA_HEADS + h) * b.longest;
      mixed[h] = b.mixed + (i * d.heads + head + h) * d.kv_lora;
    }
    loops.scores(queries, n, w.cache, positions, count, row, static_cast<float>(w.scale), scores);
    for (std::size_t h = 0; h < n; ++h) {
      loops.softmax(scores[h], count);
    }
    loops.mix(scores, n, w.cache, positions, count, row, d.kv_lora, mixed);
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
  b.scores = stage.floats(stage.threads() * MLA_HEADS * b.longest);
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
