// Products of row-major matrices in float32 and float64 lanes; decoding of every format.
//
// Lanes run along k, `sum` joins them at the end. One vector or many, the order is the same, so a token gets the same
// bits alone and in a batch.
#include "dot.hpp"

#include "columns.hpp"
#include "rotate.hpp"
#include "simd.hpp"

namespace waste {

namespace {

// ---- row-major

template <std::size_t ROWS, std::size_t VECTORS, class T>
WASTE_INLINE void rows_tile(const T *w, std::size_t cols, const float *const *x, float *const *y, std::size_t at) {
  f32x16 acc[ROWS][VECTORS]{};
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t k = 0; k < whole; k += LANES) {
    f32x16 v[VECTORS];
    for (std::size_t t = 0; t < VECTORS; ++t) {
      v[t] = load<f32x16>(x[t] + k);
    }
    for (std::size_t r = 0; r < ROWS; ++r) {
      const f32x16 row = weights(w + r * cols + k);
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[r][t] += row * v[t];
      }
    }
  }
  if (whole < cols) {
    for (std::size_t r = 0; r < ROWS; ++r) {
      T part[LANES] = {};
      std::memcpy(part, w + r * cols + whole, (cols - whole) * sizeof(T));
      const f32x16 row = weights(part);
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[r][t] += row * load_part(x[t] + whole, cols - whole);
      }
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r) {
    for (std::size_t t = 0; t < VECTORS; ++t) {
      y[t][at + r] = sum(acc[r][t]);
    }
  }
}

template <std::size_t VECTORS, class T>
WASTE_INLINE void rows_tokens(const T *w, std::size_t cols, std::size_t rows, const float *const *x, float *const *y,
                              std::size_t at) {
  std::size_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    rows_tile<4, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
  for (; r < rows; ++r) {
    rows_tile<1, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
}

template <class T>
WASTE_INLINE void rows(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                       float *const *y, std::size_t at) {
  std::size_t t = 0;
  for (; t + 2 <= tokens; t += 2) {
    rows_tokens<2>(w, cols, count, x + t, y + t, at);
  }
  if (t < tokens) {
    rows_tokens<1>(w, cols, count, x + t, y + t, at);
  }
}

template <class T>
WASTE_INLINE void rows_f64(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                           double *const *y, std::size_t at) {
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t r = 0; r < count; ++r) {
      const T *row = w + r * cols;
      f64x8 low{}, high{};
      for (std::size_t k = 0; k < whole; k += LANES) {
        low += widen(row + k) * widen(x[t] + k);
        high += widen(row + k + 8) * widen(x[t] + k + 8);
      }
      if (whole < cols) {
        T part[LANES] = {};
        float v[LANES] = {};
        std::memcpy(part, row + whole, (cols - whole) * sizeof(T));
        std::memcpy(v, x[t] + whole, (cols - whole) * sizeof(float));
        low += widen(part) * widen(v);
        high += widen(part + 8) * widen(v + 8);
      }
      y[t][at + r] = sum(low + high);
    }
  }
}

} // namespace

WASTE_CLONES void dot_f32(const float *w, std::size_t cols, std::size_t count, const float *const *x,
                          std::size_t tokens, float *const *y, std::size_t at) {
  rows(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_bf16(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x,
                           std::size_t tokens, float *const *y, std::size_t at) {
  rows(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_f32_f64(const float *w, std::size_t cols, std::size_t count, const float *const *x,
                              std::size_t tokens, double *const *y, std::size_t at) {
  rows_f64(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_bf16_f64(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x,
                               std::size_t tokens, double *const *y, std::size_t at) {
  rows_f64(w, cols, count, x, tokens, y, at);
}

// One group as 128 columns of 16 rows, rotated back and scaled.
template <Format FORMAT> WASTE_INLINE void decoded_group(const std::uint8_t *strip, f32x16 *column) {
  group_columns<FORMAT>(strip + SCALES, column);
  rotate_back(column);
  const f32x16 scale = halves(strip) * RESCALE;
  for (std::size_t k = 0; k < GROUP; ++k) {
    column[k] *= scale;
  }
}

WASTE_CLONES void decode_wt2(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt2>(strip, column); }
WASTE_CLONES void decode_wt3(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt3>(strip, column); }
WASTE_CLONES void decode_wt4(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt4>(strip, column); }
WASTE_CLONES void decode_q6(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::q6>(strip, column); }

void dot_rows(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
              float *const *y, std::size_t first) {
  const std::size_t at = begin - first;
  if (w.format == Format::f32) {
    dot_f32(reinterpret_cast<const float *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y, at);
  } else {
    dot_bf16(reinterpret_cast<const std::uint16_t *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y, at);
  }
}

void dot_rows_f64(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
                  double *const *y) {
  if (w.format == Format::f32) {
    dot_f32_f64(reinterpret_cast<const float *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y, begin);
  } else {
    dot_bf16_f64(reinterpret_cast<const std::uint16_t *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y,
                 begin);
  }
}

namespace {

// Rows `lane` to `lane` + `count` - 1 of a strip of a rotated matrix, one behind the other.
void decode_rotated(const Weight &w, std::size_t block, std::size_t lane, std::size_t count, float *out) {
  const std::uint8_t *strip = w.strip(block);
  for (std::size_t g = 0; g < w.groups(); ++g, strip += group_bytes(w.format)) {
    f32x16 column[GROUP];
    switch (w.format) {
    case Format::wt2:
      decode_wt2(strip, column);
      break;
    case Format::wt3:
      decode_wt3(strip, column);
      break;
    case Format::wt4:
      decode_wt4(strip, column);
      break;
    default:
      decode_q6(strip, column);
    }
    float value[GROUP][STRIP];
    std::memcpy(value, column, sizeof value);
    const std::size_t left = w.cols - g * GROUP, width = left < GROUP ? left : GROUP;
    for (std::size_t r = 0; r < count; ++r) {
      for (std::size_t k = 0; k < width; ++k) {
        out[r * w.cols + g * GROUP + k] = value[k][lane + r];
      }
    }
  }
}

} // namespace

void decode_block(const Weight &w, std::size_t block, float *out) {
  const std::size_t begin = block * STRIP, left = w.rows - begin, count = left < STRIP ? left : STRIP;
  if (rotated(w.format)) {
    return decode_rotated(w, block, 0, count, out);
  }
  for (std::size_t r = 0; r < count; ++r) {
    decode_row(w, begin + r, out + r * w.cols);
  }
}

void decode_row(const Weight &w, std::size_t row, float *out) {
  switch (w.format) {
  case Format::f32:
    std::memcpy(out, w.data + row * w.cols * sizeof(float), w.cols * sizeof(float));
    return;
  case Format::bf16:
    for (std::size_t k = 0; k < w.cols; ++k) {
      std::uint16_t bits;
      std::memcpy(&bits, w.data + (row * w.cols + k) * sizeof bits, sizeof bits);
      out[k] = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }
    return;
  case Format::wt2:
  case Format::wt3:
  case Format::wt4:
  case Format::q6:
    return decode_rotated(w, row / STRIP, row % STRIP, 1, out);
  case Format::q8:
  case Format::q4:
    break;
  }
  const std::size_t lane = row % STRIP;
  const std::uint8_t *group = w.strip(row / STRIP);
  for (std::size_t g = 0; g < w.groups(); ++g, group += group_bytes(w.format)) {
    float scale[STRIP];
    store(scale, halves(group));
    const std::size_t left = w.cols - g * GROUP, count = left < GROUP ? left : GROUP;
    for (std::size_t k = 0; k < count; ++k) {
      int code;
      if (w.format == Format::q8) {
        code = static_cast<std::int8_t>(group[SCALES + k / 4 * VECTOR + 4 * lane + k % 4]);
      } else {
        const int byte = group[SCALES + k / 8 * VECTOR + 4 * lane + k % 4];
        code = (k % 8 < 4 ? byte & 15 : byte >> 4) - 8;
      }
      out[g * GROUP + k] = static_cast<float>(code) * scale[lane];
    }
  }
}

} // namespace waste
