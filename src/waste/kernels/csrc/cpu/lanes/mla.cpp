// The loops of latent attention over the rows of the cache that one query attends to.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

WASTE_INLINE const float *attended(const float *cache, const std::int32_t *positions, std::size_t j, std::size_t row) {
  return cache + (positions != nullptr ? static_cast<std::size_t>(positions[j]) : j) * row;
}

template <std::size_t HEADS>
WASTE_INLINE void scores_of(const float *const *q, const float *cache, const std::int32_t *positions,
                            std::size_t count, std::size_t row, float scale, float *const *score) {
  const std::size_t whole = row / LANES * LANES;
  for (std::size_t j = 0; j < count; ++j) {
    const float *key = attended(cache, positions, j, row);
    Floats acc[HEADS][PARTS]{};
    for (std::size_t r = 0; r < whole; r += LANES) {
      for (std::size_t p = 0; p < PARTS; ++p) {
        const Floats k = floats(key + r + p * FLOATS);
        for (std::size_t h = 0; h < HEADS; ++h) {
          acc[h][p] += floats(q[h] + r + p * FLOATS) * k;
        }
      }
    }
    if (whole < row) {
      const Rest<float> k(key, whole, row);
      for (std::size_t h = 0; h < HEADS; ++h) {
        const Rest<float> query(q[h], whole, row);
        for (std::size_t p = 0; p < PARTS; ++p) {
          acc[h][p] += floats(query.of + p * FLOATS) * floats(k.of + p * FLOATS);
        }
      }
    }
    for (std::size_t h = 0; h < HEADS; ++h) {
      score[h][j] = sum(acc[h]) * scale;
    }
  }
}

// Rows are taken in blocks that stay in the second-level cache while all columns pass over them.
template <std::size_t HEADS>
WASTE_INLINE void mix_of(float *const *p, const float *cache, const std::int32_t *positions, std::size_t count,
                         std::size_t row, std::size_t width, float *const *mixed) {
  constexpr std::size_t block = 64;
  for (std::size_t h = 0; h < HEADS; ++h) {
    __builtin_memset(mixed[h], 0, width * sizeof(float));
  }
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t end = count < begin + block ? count : begin + block;
    each(width, [=](std::size_t at, std::size_t lanes) __attribute__((always_inline)) {
      Floats acc[HEADS];
      for (std::size_t h = 0; h < HEADS; ++h) {
        acc[h] = some(mixed[h] + at, lanes);
      }
      for (std::size_t j = begin; j < end; ++j) {
        const Floats v = some(attended(cache, positions, j, row) + at, lanes);
        for (std::size_t h = 0; h < HEADS; ++h) {
          acc[h] += v * p[h][j];
        }
      }
      for (std::size_t h = 0; h < HEADS; ++h) {
        store_some(mixed[h] + at, acc[h], lanes);
      }
    });
  }
}

void softmax(float *score, std::size_t count) {
  float top = -__builtin_inff();
  for (std::size_t j = 0; j < count; ++j) {
    top = score[j] > top ? score[j] : top;
  }
  Doubles total[WIDE_PARTS]{};
  for (std::size_t j = 0; j < count; j += LANES) {
    float part[LANES] = {};
    each(count - j < LANES ? count - j : LANES, [&](std::size_t at, std::size_t n) __attribute__((always_inline)) {
      store_some(part + at, exp(some(score + j + at, n) - top), n);
      store_some(score + j + at, some(part + at, n), n);
    });
    for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
      total[p] += doubles(part + p * DOUBLES);
    }
  }
  const float share = static_cast<float>(1.0 / sum(total));
  for (std::size_t j = 0; j < count; ++j) {
    score[j] *= share;
  }
}

void scores(const float *const *q, std::size_t heads, const float *cache, const std::int32_t *positions,
            std::size_t count, std::size_t row, float scale, float *const *score) {
  if (heads == MLA_HEADS) {
    return scores_of<MLA_HEADS>(q, cache, positions, count, row, scale, score);
  }
  for (std::size_t h = 0; h < heads; ++h) {
    scores_of<1>(q + h, cache, positions, count, row, scale, score + h);
  }
}

void mix(float *const *p, std::size_t heads, const float *cache, const std::int32_t *positions, std::size_t count,
         std::size_t row, std::size_t width, float *const *mixed) {
  if (heads == MLA_HEADS) {
    return mix_of<MLA_HEADS>(p, cache, positions, count, row, width, mixed);
  }
  for (std::size_t h = 0; h < heads; ++h) {
    mix_of<1>(p + h, cache, positions, count, row, width, mixed + h);
  }
}

} // namespace

const MlaLanes MLA = {softmax, scores, mix};

} // namespace waste::WASTE_ISA
