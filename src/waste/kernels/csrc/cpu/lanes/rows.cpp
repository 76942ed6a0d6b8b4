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

// Rows that share a conversion of the vector to float64.
template <std::size_t ROWS, class T>
WASTE_INLINE void rows_f64_tile(const T *w, std::size_t cols, const float *x, double *y) {
  f64x8 low[ROWS]{}, high[ROWS]{};
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t k = 0; k < whole; k += LANES) {
    const f64x8 a = widen(x + k), b = widen(x + k + 8);
    for (std::size_t r = 0; r < ROWS; ++r) {
      low[r] += widen(w + r * cols + k) * a;
      high[r] += widen(w + r * cols + k + 8) * b;
    }
  }
  if (whole < cols) {
    float v[LANES];
    store(v, load_part(x + whole, cols - whole));
    for (std::size_t r = 0; r < ROWS; ++r) {
      T part[LANES] = {};
      __builtin_memcpy(part, w + r * cols + whole, (cols - whole) * sizeof(T));
      low[r] += widen(part) * widen(v);
      high[r] += widen(part + 8) * widen(v + 8);
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r) {
    y[r] = sum(low[r] + high[r]);
  }
}

template <class T>
WASTE_INLINE void rows_f64(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                           double *const *y, std::size_t at) {
  for (std::size_t t = 0; t < tokens; ++t) {
    std::size_t r = 0;
    for (; r + 4 <= count; r += 4) {
      rows_f64_tile<4>(w + r * cols, cols, x[t], y[t] + at + r);
    }
    for (; r < count; ++r) {
      rows_f64_tile<1>(w + r * cols, cols, x[t], y[t] + at + r);
    }
  }
}

} // namespace

const RowLanes ROWS = {rows<float>, rows<std::uint16_t>, rows_f64<float>, rows_f64<std::uint16_t>};

} // namespace waste::WASTE_ISA
