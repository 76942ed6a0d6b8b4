// Products of row-major matrices with some vectors: lanes run along k, `sum` joins them at the end. One vector or many,
// the order is the same, so a token gets the same bits alone and in a batch.
#include "lanes.hpp"

#include "../simd.hpp"

namespace waste::WASTE_ISA {

namespace {

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
      __builtin_memcpy(part, w + r * cols + whole, (cols - whole) * sizeof(T));
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
        __builtin_memcpy(part, row + whole, (cols - whole) * sizeof(T));
        __builtin_memcpy(v, x[t] + whole, (cols - whole) * sizeof(float));
        low += widen(part) * widen(v);
        high += widen(part + 8) * widen(v + 8);
      }
      y[t][at + r] = sum(low + high);
    }
  }
}

} // namespace

const RowLanes ROWS = {rows<float>, rows<std::uint16_t>, rows_f64<float>, rows_f64<std::uint16_t>};

} // namespace waste::WASTE_ISA
