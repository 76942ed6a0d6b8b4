// The loops of latent attention over the rows of the cache that one query attends to.
#include "lanes.hpp"

#include "tile.hpp"

namespace waste::WASTE_ISA {

namespace {

// mixed (width, wide) = mixed * keep + sum over j of score[j] * rows[j], without the first summand if `fresh`: here M
// columns from `at` on.
template <bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void mix_tile(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                           std::size_t at, const float *keep, float *mixed, bool fresh) {
  Floats acc[M][N]{};
  tile<FUSED, N, M>(score, wide, count, [&](std::size_t j, std::size_t m) { return (rows[j] + at)[m]; }, acc);
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      float *to = mixed + (at + m) * wide + n * FLOATS;
      store(to, fresh ? acc[m][n] : madd<FUSED>(floats(to), floats(keep + n * FLOATS), acc[m][n]));
    }
  }
}

// All columns. Meanwhile the rows of the next block are fetched into the second-level cache, some after every tile: 71
// instead of 68.5 G multiply-adds/s over 32k rows, no difference over 8k (LEARNED: mla-prefetch).
template <bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void mix_heads(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                            std::size_t width, const float *keep, float *mixed, bool fresh,
                            const float *const *next, std::size_t next_count, std::size_t row) {
  std::size_t at = 0, j = 0;
  for (; at + M <= width; at += M) {
    mix_tile<FUSED, N, M>(score, wide, rows, count, at, keep, mixed, fresh);
    for (const std::size_t until = next_count * (at + M) / width; j < until; ++j) {
      for (std::size_t r = 0; r < row; r += 16) {
        __builtin_prefetch(next[j] + r, 0, 2);
      }
    }
  }
  for (; at < width; ++at) {
    mix_tile<FUSED, N, 1>(score, wide, rows, count, at, keep, mixed, fresh);
  }
}

template <bool FUSED>
WASTE_INLINE void mix(const float *score, std::size_t wide, const float *const *rows, std::size_t count,
                      std::size_t width, const float *keep, float *mixed, bool fresh, const float *const *next,
                      std::size_t next_count, std::size_t row) {
  std::size_t h = 0;
  for (; h + TILE_VECTORS * FLOATS <= wide; h += TILE_VECTORS * FLOATS) {
    mix_heads<FUSED, TILE_VECTORS, TILE_NUMBERS>(score + h, wide, rows, count, width, keep + h, mixed + h, fresh,
                                                next, h == 0 ? next_count : 0, row);
  }
  if (TILE_VECTORS == 4 && h + 2 * FLOATS <= wide) {
    mix_heads<FUSED, 2, 8>(score + h, wide, rows, count, width, keep + h, mixed + h, fresh, next,
                              h == 0 ? next_count : 0, row);
    h += 2 * FLOATS;
  }
  for (; h < wide; h += FLOATS) {
    mix_heads<FUSED, 1, 8>(score + h, wide, rows, count, width, keep + h, mixed + h, fresh, next,
                              h == 0 ? next_count : 0, row);
  }
}

// score (count, wide) -> e^(score - top), with the largest score `top` of each head and the sum `total` of all its
// exponentials brought up to date; keep = what earlier sums count for.
WASTE_INLINE void exponentials(float *score, std::size_t count, std::size_t wide, float *top, double *total,
                               float *keep) {
  for (std::size_t h = 0; h < wide; h += FLOATS) {
    const Floats before = floats(top + h);
    Floats now = before;
    for (std::size_t j = 0; j < count; ++j) {
      const Floats x = floats(score + j * wide + h);
      now = x > now ? x : now;
    }
    Floats added{};
    for (std::size_t j = 0; j < count; ++j) {
      float *at = score + j * wide + h;
      const Floats x = exp(floats(at) - now);
      added += x;
      store(at, x);
    }
    store(top + h, now);
    store(keep + h, exp(before - now));
    for (std::size_t i = h; i < h + FLOATS; ++i) {
      total[i] = total[i] * keep[i] + added[i - h];
    }
  }
}

template <bool FUSED>
WASTE_INLINE void segment(const float *q, std::size_t wide, const float *cache, std::size_t row,
                          const std::int32_t *positions, std::size_t begin, std::size_t end, std::size_t width,
                          float *score, float *top, double *total, float *mixed) {
  alignas(64) float keep[MLA_HEADS];
  const float *block[2][ATTENTION_ROWS], **rows = block[0], **next = block[1];
  const auto locate = [&](const float **to, std::size_t from) {
    const std::size_t count = end - from < ATTENTION_ROWS ? end - from : ATTENTION_ROWS;
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
    scores<FUSED>(q, wide, row, rows, count, score);
    exponentials(score, count, wide, top, total, keep);
    mix<FUSED>(score, wide, rows, count, width, keep, mixed, fresh, next, after, row);
    fresh = false;
    const float **used = rows;
    rows = next;
    next = used;
  }
}

// Fused where the instruction set can: 1.75 times as fast, and other bits than on the baseline.
void run(const float *q, std::size_t wide, const float *cache, std::size_t row, const std::int32_t *positions,
         std::size_t begin, std::size_t end, std::size_t width, float *score, float *top, double *total, float *mixed) {
  segment<true>(q, wide, cache, row, positions, begin, end, width, score, top, total, mixed);
}

void join(const float *part, std::size_t stride, std::size_t segments, const float *top,
          const double *total, std::size_t heads, std::size_t wide, std::size_t width, float *share,
          float *mixed) {
  constexpr std::size_t across = 16;
  alignas(64) float turned[across * MLA_HEADS];
  for (std::size_t h = 0; h < wide; h += FLOATS) {
    Floats largest = floats(top + h);
    for (std::size_t s = 1; s < segments; ++s) {
      const Floats other = floats(top + s * MLA_HEADS + h);
      largest = other > largest ? other : largest;
    }
    double sums[FLOATS] = {};
    for (std::size_t s = 0; s < segments; ++s) {
      const Floats factor = exp(floats(top + s * MLA_HEADS + h) - largest);
      store(share + s * MLA_HEADS + h, factor);
      for (std::size_t i = 0; i < FLOATS; ++i) {
        sums[i] += factor[i] * total[s * MLA_HEADS + h + i];
      }
    }
    for (std::size_t s = 0; s < segments; ++s) {
      for (std::size_t i = 0; i < FLOATS; ++i) {
        share[s * MLA_HEADS + h + i] = static_cast<float>(share[s * MLA_HEADS + h + i] / sums[i]);
      }
    }
  }
  for (std::size_t at = 0; at < width; at += across) {
    const std::size_t count = width - at < across ? width - at : across;
    for (std::size_t c = 0; c < count; ++c) {
      for (std::size_t h = 0; h < wide; h += FLOATS) {
        Floats sum{};
        for (std::size_t s = 0; s < segments; ++s) {
          sum += floats(part + s * stride + (at + c) * wide + h) * floats(share + s * MLA_HEADS + h);
        }
        store(turned + c * MLA_HEADS + h, sum);
      }
    }
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t c = 0; c < count; ++c) {
        mixed[h * width + at + c] = turned[c * MLA_HEADS + h];
      }
    }
  }
}

} // namespace

const MlaLanes MLA = {run, join};

} // namespace waste::WASTE_ISA
