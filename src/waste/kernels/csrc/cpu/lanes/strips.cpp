// Products of one strip with some vectors. Lanes are the 16 rows; four accumulators (k mod 4) per group of 128, joined
// and scaled at the end of the group. One vector or many, the order is the same, so a token gets the same bits alone and
// in a batch.
#include "lanes.hpp"

#include "../dot.hpp"
#include "columns.hpp"

namespace waste::WASTE_ISA {

namespace {

// 128 inputs of group g: in place, but in the buffer when columns are missing, which are zero.
template <Format FORMAT>
WASTE_INLINE const float *inputs(const float *x, std::size_t g, std::size_t cols, float *buffer) {
  const std::size_t left = cols - g * GROUP;
  if (rotated(FORMAT) || left >= GROUP) { // rotated ones are whole
    return x + g * GROUP;
  }
  __builtin_memset(buffer, 0, GROUP * sizeof(float));
  __builtin_memcpy(buffer, x + g * GROUP, left * sizeof(float));
  return buffer;
}

template <std::size_t VECTORS>
WASTE_INLINE void strip_group(const f32x16 *column, const float *const *v, f32x16 scale, f32x16 *total) {
  f32x16 acc[VECTORS][4]{};
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    for (std::size_t q = 0; q < 4; ++q) {
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[t][q] += column[4 * j + q] * v[t][4 * j + q];
      }
    }
  }
  for (std::size_t t = 0; t < VECTORS; ++t) {
    total[t] += ((acc[t][0] + acc[t][1]) + (acc[t][2] + acc[t][3])) * scale;
  }
}

template <Format FORMAT>
WASTE_INLINE f32x16 strip_one(const std::uint8_t *strip, std::size_t cols, const float *x) {
  f32x16 total{};
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    float buffer[GROUP];
    const float *v = inputs<FORMAT>(x, g, cols, buffer);
    f32x16 acc[4]{};
    // Eight unrolled together: where a column lies in its code vectors is then known at compile time, in every format.
    for (std::size_t eight = 0; eight < GROUP / 4; eight += 8) {
#pragma GCC unroll 8
      for (std::size_t j = eight; j < eight + 8; ++j) {
        f32x16 column[4];
        columns<FORMAT>(strip + SCALES, j, column);
        for (std::size_t q = 0; q < 4; ++q) {
          acc[q] += column[q] * v[4 * j + q];
        }
      }
    }
    total += ((acc[0] + acc[1]) + (acc[2] + acc[3])) * group_scale<FORMAT>(strip);
    strip += group_bytes(FORMAT);
  }
  return total;
}

// Many vectors: each group is decoded once for all of them.
template <Format FORMAT>
WASTE_INLINE void strip_many(const std::uint8_t *strip, std::size_t cols, const float *const *x, std::size_t tokens,
                             f32x16 *total) {
  for (std::size_t t = 0; t < tokens; ++t) {
    total[t] = f32x16{};
  }
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    f32x16 column[GROUP];
    group_columns<FORMAT>(strip + SCALES, column);
    const f32x16 scale = group_scale<FORMAT>(strip);
    float buffer[2][GROUP];
    std::size_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      const float *v[2] = {inputs<FORMAT>(x[t], g, cols, buffer[0]), inputs<FORMAT>(x[t + 1], g, cols, buffer[1])};
      strip_group<2>(column, v, scale, total + t);
    }
    if (t < tokens) {
      const float *v[1] = {inputs<FORMAT>(x[t], g, cols, buffer[0])};
      strip_group<1>(column, v, scale, total + t);
    }
    strip += group_bytes(FORMAT);
  }
}

template <Format FORMAT>
WASTE_INLINE void strip_rows(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                             const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  if (tokens == 1) {
    float lane[STRIP];
    store(lane, strip_one<FORMAT>(strip, cols, x[0]));
    __builtin_memcpy(y[0] + at, lane + begin, (end - begin) * sizeof(float));
    return;
  }
  f32x16 total[TOKENS];
  strip_many<FORMAT>(strip, cols, x, tokens, total);
  for (std::size_t t = 0; t < tokens; ++t) {
    float lane[STRIP];
    store(lane, total[t]);
    __builtin_memcpy(y[t] + at, lane + begin, (end - begin) * sizeof(float));
  }
}

template <Format FORMAT>
WASTE_INLINE void strip_f64(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                            const float *const *x, std::size_t tokens, double *const *y, std::size_t at) {
  double total[TOKENS][STRIP] = {};
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    float scale[STRIP], column[GROUP][STRIP];
    f32x16 decoded[GROUP];
    store(scale, group_scale<FORMAT>(strip));
    group_columns<FORMAT>(strip + SCALES, decoded);
    __builtin_memcpy(column, decoded, sizeof column);
    const std::size_t left = cols - g * GROUP, count = left < GROUP ? left : GROUP;
    for (std::size_t t = 0; t < tokens; ++t) {
      double v[GROUP] = {};
      for (std::size_t k = 0; k < count; ++k) {
        v[k] = x[t][g * GROUP + k];
      }
      if constexpr (rotated(FORMAT)) {
        rotate(v);
      }
      double acc[STRIP] = {};
      for (std::size_t k = 0; k < GROUP; ++k) {
        for (std::size_t r = 0; r < STRIP; ++r) {
          acc[r] += static_cast<double>(column[k][r]) * v[k];
        }
      }
      for (std::size_t r = 0; r < STRIP; ++r) {
        total[t][r] += acc[r] * scale[r];
      }
    }
    strip += group_bytes(FORMAT);
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    __builtin_memcpy(y[t] + at, total[t] + begin, (end - begin) * sizeof(double));
  }
}

void dot(Format format, const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
         const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  switch (format) {
  case Format::q8:
    return strip_rows<Format::q8>(strip, cols, begin, end, x, tokens, y, at);
  case Format::q4:
    return strip_rows<Format::q4>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt2:
    return strip_rows<Format::wt2>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt3:
    return strip_rows<Format::wt3>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt4:
    return strip_rows<Format::wt4>(strip, cols, begin, end, x, tokens, y, at);
  case Format::q6:
    return strip_rows<Format::q6>(strip, cols, begin, end, x, tokens, y, at);
  default:
    return;
  }
}

void dot_f64(Format format, const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
             const float *const *x, std::size_t tokens, double *const *y, std::size_t at) {
  switch (format) {
  case Format::q8:
    return strip_f64<Format::q8>(strip, cols, begin, end, x, tokens, y, at);
  case Format::q4:
    return strip_f64<Format::q4>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt2:
    return strip_f64<Format::wt2>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt3:
    return strip_f64<Format::wt3>(strip, cols, begin, end, x, tokens, y, at);
  case Format::wt4:
    return strip_f64<Format::wt4>(strip, cols, begin, end, x, tokens, y, at);
  case Format::q6:
    return strip_f64<Format::q6>(strip, cols, begin, end, x, tokens, y, at);
  default:
    return;
  }
}

} // namespace

const StripLanes STRIPS = {dot, dot_f64};

} // namespace waste::WASTE_ISA
