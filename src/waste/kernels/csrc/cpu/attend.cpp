// MLA attention over the cache: scores, softmax and mix per query, then the two output projections.
//
// The rows a query attends to are cut into at most 32 segments, by their number alone. A segment knows its largest
// score and what it mixed relative to that, rows in blocks of 96, and segments are joined in order. So a query gets
// the same bits alone or in a chunk, and one query keeps as many threads busy as it has segments. A block of rows is
// read once for all heads; memory does not grow with the context.
#include "mla.hpp"

#include "heads.hpp"
#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "simd.hpp"

#include <algorithm>

namespace waste {

namespace {

constexpr std::size_t HEADS = MLA_HEADS, ROWS = ATTENTION_ROWS;

constexpr std::size_t SEGMENTS = 32; // most of one query
constexpr std::size_t SHORTEST = 192; // rows worth a segment of their own

// What the segments of a few queries leave behind: 4 MB for one query of 64 heads and 512 channels.
constexpr std::size_t MEMORY = std::size_t{1} << 20; // floats

struct Buffers {
  float *queries; // (queries at once, groups, row, HEADS)
  float *parts;   // (queries at once, groups, segments, kv_lora, HEADS)
  float *tops;    // (queries at once, groups, segments, HEADS)
  double *totals; // the same
  float *shares;  // the same
  float *scores;  // (threads, ROWS, HEADS)
  float *mixed;   // (chunk, H, kv_lora)
  float *values;  // (chunk, H * v)
  Product *heads; // (H)
  std::size_t at_once;
  std::size_t segments; // most of any query
};

std::size_t segment_rows(std::size_t attended) {
  return ceil_div(std::max(SHORTEST, ceil_div(attended, SEGMENTS)), ROWS) * ROWS;
}

void chunk(Stage &stage, const float *q, const MlaAttention &w, const MlaDims &d, const Buffers &b, float *out) {
  const std::size_t t = d.tokens, row = d.row(), groups = ceil_div(d.heads, HEADS), most = b.segments;
  const auto attended = [&](std::size_t i) {
    return w.positions == nullptr ? w.start + i + 1 : static_cast<std::size_t>(w.offsets[i + 1] - w.offsets[i]);
  };
  const auto heads_of = [&](std::size_t group) { return std::min(HEADS, d.heads - group * HEADS); };
  const MlaLanes &loops = lanes().mla;
  for (std::size_t first = 0; first < t; first += b.at_once) {
    const std::size_t n = std::min(b.at_once, t - first);
    std::size_t work = 0;
    for (std::size_t i = 0; i < n; ++i) {
      work += attended(first + i) * d.heads * (row + d.kv_lora);
    }
    stage.parallel(n * groups, n * d.heads * row * 4, [&](std::size_t item, std::size_t) {
      const std::size_t i = item / groups, group = item % groups, heads = heads_of(group);
      heads_in_lanes(q + ((first + i) * d.heads + group * HEADS) * row, heads, ceil_div(heads, LANES) * LANES, row,
                     static_cast<float>(w.scale), b.queries + item * row * HEADS);
    });
    stage.parallel(n * groups * most, work, [&](std::size_t item, std::size_t worker) {
      const std::size_t turned = item / most, i = first + turned / groups, heads = heads_of(turned % groups);
      const std::size_t count = attended(i), rows = segment_rows(count), begin = item % most * rows;
      if (begin < count) {
        loops.segment(b.queries + turned * row * HEADS, ceil_div(heads, LANES) * LANES, w.cache, row,
                    w.positions == nullptr ? nullptr : w.positions + w.offsets[i], begin,
                    std::min(count, begin + rows), d.kv_lora, b.scores + worker * ROWS * HEADS, b.tops + item * HEADS,
                    b.totals + item * HEADS, b.parts + item * d.kv_lora * HEADS);
      }
    });
    stage.parallel(n * groups, n * most * d.heads * d.kv_lora, [&](std::size_t item, std::size_t) {
      const std::size_t i = first + item / groups, group = item % groups, heads = heads_of(group);
      const std::size_t count = attended(i), at = item * most * HEADS;
      loops.join(b.parts + at * d.kv_lora, d.kv_lora * HEADS, ceil_div(count, segment_rows(count)), b.tops + at,
               b.totals + at, heads, ceil_div(heads, LANES) * LANES, d.kv_lora, b.shares + at,
               b.mixed + (i * d.heads + group * HEADS) * d.kv_lora);
    });
  }
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
  b.segments = 1;
  for (std::size_t i = 0; i < dims.tokens; ++i) {
    const std::size_t attended = w.positions == nullptr ? w.start + i + 1
                                                        : static_cast<std::size_t>(w.offsets[i + 1] - w.offsets[i]);
    b.segments = std::max(b.segments, ceil_div(attended, segment_rows(attended)));
  }
  // Enough queries at a time for every thread to have a segment, and no more than fit the memory meant for them.
  const std::size_t groups = ceil_div(dims.heads, HEADS), parts = groups * b.segments;
  b.at_once = std::max(MEMORY / (parts * HEADS * dims.kv_lora), ceil_div(stage.threads(), parts));
  b.at_once = std::min(b.at_once, most);
  b.queries = stage.floats(b.at_once * groups * dims.row() * HEADS);
  b.parts = stage.floats(b.at_once * parts * dims.kv_lora * HEADS);
  b.tops = stage.floats(b.at_once * parts * HEADS);
  b.totals = stage.array<double>(b.at_once * parts * HEADS);
  b.shares = stage.floats(b.at_once * parts * HEADS);
  b.scores = stage.floats(stage.threads() * ROWS * HEADS);
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
