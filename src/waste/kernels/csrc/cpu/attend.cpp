// MLA attention over the cache: scores, softmax and mix per query, then the two output projections.
//
// The rows a query attends to are cut into at most 32 segments, by their number alone. A segment knows its largest
// score and what it mixed relative to that, rows in blocks of 96, and segments are joined in order. So a query gets
// the same bits alone or in a chunk, and one query keeps as many threads busy as it has segments. A block of rows is
// read once for all heads; memory does not grow with the context.
#include "mla.hpp"

#include "linear.hpp"
#include "simd.hpp"
#include "tile.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace waste {

namespace {

// Heads in lanes, 64 at a time: four AVX-512 registers.
constexpr std::size_t HEADS = 64;

// mixed (width, wide) = mixed * keep + sum over j of score[j] * rows[j]: the part of `tile` width M at column `at`.
template <class V, bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void mix_tile(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                           std::size_t at, const float *keep, float *mixed) {
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  V acc[M][N]{};
  tile<V, FUSED, N, M>(score, wide, count, [&](std::size_t j, std::size_t m) { return (rows[j] + at)[m]; }, acc);
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      float *to = mixed + (at + m) * wide + n * lanes;
      store(to, keep == nullptr ? acc[m][n] : madd<FUSED>(load<V>(to), load<V>(keep + n * lanes), acc[m][n]));
    }
  }
}

template <class V, bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void mix_heads(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                            std::size_t width, const float *keep, float *mixed, const float *const *next,
                            std::size_t next_count, std::size_t row) {
  std::size_t at = 0, j = 0;
  for (; at + M <= width; at += M) {
    mix_tile<V, FUSED, N, M>(score, wide, rows, count, at, keep, mixed);
    for (const std::size_t until = next_count * (at + M) / width; j < until; ++j) {
      for (std::size_t r = 0; r < row; r += 16) {
        __builtin_prefetch(next[j] + r, 0, 2);
      }
    }
  }
  for (; at < width; ++at) {
    mix_tile<V, FUSED, N, 1>(score, wide, rows, count, at, keep, mixed);
  }
}

template <int LEVEL, bool FUSED>
WASTE_INLINE void mix(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                      std::size_t width, const float *keep, float *mixed, const float *const *next,
                      std::size_t next_count, std::size_t row) {
  using T = Tile<LEVEL>;
  using V = typename T::V;
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  std::size_t h = 0;
  for (; h + T::VECTORS * lanes <= wide; h += T::VECTORS * lanes) {
    mix_heads<V, FUSED, T::VECTORS, T::NUMBERS>(score + h, wide, rows, count, width, keep == nullptr ? nullptr : keep + h, mixed + h, next,
                                                h == 0 ? next_count : 0, row);
  }
  if (T::VECTORS == 4 && h + 2 * lanes <= wide) {
    mix_heads<V, FUSED, 2, 8>(score + h, wide, rows, count, width, keep == nullptr ? nullptr : keep + h, mixed + h, next,
                              h == 0 ? next_count : 0, row);
    h += 2 * lanes;
  }
  for (; h < wide; h += lanes) {
    mix_heads<V, FUSED, 1, 8>(score + h, wide, rows, count, width, keep == nullptr ? nullptr : keep + h, mixed + h, next,
                              h == 0 ? next_count : 0, row);
  }
}

// score (count, wide) -> e^(score - top), with the largest score `top` of each head and the sum `total` of all its
// exponentials brought up to date; keep = what earlier sums count for.
WASTE_INLINE void exponentials(float *score, std::size_t count, std::size_t wide, float *top, double *total,
                               float *keep) {
  for (std::size_t h = 0; h < wide; h += LANES) {
    const f32x16 before = load<f32x16>(top + h);
    f32x16 now = before;
    for (std::size_t j = 0; j < count; ++j) {
      const f32x16 x = load<f32x16>(score + j * wide + h);
      now = x > now ? x : now;
    }
    f32x16 added{};
    for (std::size_t j = 0; j < count; ++j) {
      float *at = score + j * wide + h;
      const f32x16 x = exp(load<f32x16>(at) - now);
      added += x;
      store(at, x);
    }
    store(top + h, now);
    store(keep + h, exp(before - now));
    for (std::size_t i = h; i < h + LANES; ++i) {
      total[i] = total[i] * keep[i] + added[i - h];
    }
  }
}

template <int LEVEL, bool FUSED>
WASTE_INLINE void segment(const float *q, std::size_t wide, const float *cache, std::size_t row,
                          const std::int32_t *positions, std::size_t begin, std::size_t end, std::size_t width,
                          float *score, float *top, double *total, float *mixed) {
  alignas(64) float keep[HEADS];
  const float *block[2][ROWS], **rows = block[0], **next = block[1];
  const auto locate = [&](const float **to, std::size_t from) {
    const std::size_t count = end - from < ROWS ? end - from : ROWS;
    for (std::size_t j = 0; j < count; ++j) {
      to[j] = cache + (positions != nullptr ? static_cast<std::size_t>(positions[from + j]) : from + j) * row;
    }
    return count;
  };
  for (std::size_t h = 0; h < wide; ++h) {
    top[h] = -__builtin_inff();
    total[h] = 0.0;
  }
  bool fresh = true;
  for (std::size_t count = locate(rows, begin), after; count > 0; count = after) {
    begin += count;
    after = locate(next, begin);
    scores<LEVEL, FUSED>(q, wide, row, rows, count, score);
    exponentials(score, count, wide, top, total, keep);
    mix<LEVEL, FUSED>(score, wide, rows, count, width, fresh ? nullptr : keep, mixed, next, after, row);
    fresh = false;
    const float **used = rows;
    rows = next;
    next = used;
  }
}

} // namespace

// One run of attended rows, begin <= j < end, for `wide` heads: q (row, wide), scaled. Of the rows' softmax the largest
// score, the sum of e^(score - top), and the mix (width, wide) they weigh. score (ROWS, wide) is scratch.
WASTE_VERSIONS(void mla_segment(const float *q, std::size_t wide, const float *cache, std::size_t row,
                                const std::int32_t *positions, std::size_t begin, std::size_t end, std::size_t width,
                                float *score, float *top, double *total, float *mixed),
               segment<LEVEL, LEVEL >= 3>(q, wide, cache, row, positions, begin, end, width, score, top, total, mixed))

// mixed (heads, width) = the segments' mixes (width, wide each, `stride` numbers apart), weighed by their shares of the
// softmax over all of them. top, total (segments, HEADS); share (segments, HEADS) is scratch.
WASTE_CLONES void mla_join(const float *part, std::size_t stride, std::size_t segments, const float *top,
                       const double *total, std::size_t heads, std::size_t wide, std::size_t width, float *share,
                       float *mixed) {
  constexpr std::size_t across = 16;
  alignas(64) float turned[across * HEADS];
  for (std::size_t h = 0; h < wide; h += LANES) {
    f32x16 largest = load<f32x16>(top + h);
    for (std::size_t s = 1; s < segments; ++s) {
      const f32x16 other = load<f32x16>(top + s * HEADS + h);
      largest = other > largest ? other : largest;
    }
    double sums[LANES] = {};
    for (std::size_t s = 0; s < segments; ++s) {
      const f32x16 factor = exp(load<f32x16>(top + s * HEADS + h) - largest);
      store(share + s * HEADS + h, factor);
      for (std::size_t i = 0; i < LANES; ++i) {
        sums[i] += factor[i] * total[s * HEADS + h + i];
      }
    }
    for (std::size_t s = 0; s < segments; ++s) {
      for (std::size_t i = 0; i < LANES; ++i) {
        share[s * HEADS + h + i] = static_cast<float>(share[s * HEADS + h + i] / sums[i]);
      }
    }
  }
  for (std::size_t at = 0; at < width; at += across) {
    const std::size_t count = width - at < across ? width - at : across;
    for (std::size_t c = 0; c < count; ++c) {
      for (std::size_t h = 0; h < wide; h += LANES) {
        f32x16 sum{};
        for (std::size_t s = 0; s < segments; ++s) {
          sum += load<f32x16>(part + s * stride + (at + c) * wide + h) * load<f32x16>(share + s * HEADS + h);
        }
        store(turned + c * HEADS + h, sum);
      }
    }
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t c = 0; c < count; ++c) {
        mixed[h * width + at + c] = turned[c * HEADS + h];
      }
    }
  }
}

namespace {

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
        mla_segment(b.queries + turned * row * HEADS, ceil_div(heads, LANES) * LANES, w.cache, row,
                    w.positions == nullptr ? nullptr : w.positions + w.offsets[i], begin,
                    std::min(count, begin + rows), d.kv_lora, b.scores + worker * ROWS * HEADS, b.tops + item * HEADS,
                    b.totals + item * HEADS, b.parts + item * d.kv_lora * HEADS);
      }
    });
    stage.parallel(n * groups, n * most * d.heads * d.kv_lora, [&](std::size_t item, std::size_t) {
      const std::size_t i = first + item / groups, group = item % groups, heads = heads_of(group);
      const std::size_t count = attended(i), at = item * most * HEADS;
      mla_join(b.parts + at * d.kv_lora, d.kv_lora * HEADS, ceil_div(count, segment_rows(count)), b.tops + at,
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
