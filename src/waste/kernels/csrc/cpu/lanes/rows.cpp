// Products of row-major matrices with some vectors: lanes run along k, `sum` joins them at the end. One vector or many,
// the order is the same, so a token gets the same bits alone and in a batch.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

// Rows and vectors whose sums the registers hold. Alone, a vector wants enough rows to hide the latency of an addition:
// eight sums.
constexpr std::size_t TILE_VECTORS = FLOATS == 16 ? 4 : FLOATS == 8 ? 2 : 1;
constexpr std::size_t TILE_ROWS = MANY_REGISTERS ? 4 : 2;
constexpr std::size_t ROWS_ALONE = MANY_REGISTERS ? 4 : 8 / PARTS;

template <std::size_t ROWS, std::size_t VECTORS, class T>
WASTE_INLINE void tile(const T *w, std::size_t cols, const float *const *x, float *const *y, std::size_t at) {
  Floats acc[ROWS][VECTORS][PARTS]{};
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t k = 0; k < whole; k += LANES) {
    for (std::size_t p = 0; p < PARTS; ++p) {
      Floats v[VECTORS];
      for (std::size_t t = 0; t < VECTORS; ++t) {
        v[t] = floats(x[t] + k + p * FLOATS);
      }
      for (std::size_t r = 0; r < ROWS; ++r) {
        const Floats row = floats(w + r * cols + k + p * FLOATS);
        for (std::size_t t = 0; t < VECTORS; ++t) {
          acc[r][t][p] += row * v[t];
        }
      }
    }
  }
  if (whole < cols) {
    for (std::size_t r = 0; r < ROWS; ++r) {
      const Rest<T> row(w + r * cols, whole, cols);
      for (std::size_t t = 0; t < VECTORS; ++t) {
        const Rest<float> v(x[t], whole, cols);
        for (std::size_t p = 0; p < PARTS; ++p) {
          acc[r][t][p] += floats(row.of + p * FLOATS) * floats(v.of + p * FLOATS);
        }
      }
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r) {
    for (std::size_t t = 0; t < VECTORS; ++t) {
      y[t][at + r] = sum(acc[r][t]);
    }
  }
}

template <std::size_t ROWS, std::size_t VECTORS, class T>
WASTE_INLINE void tiles(const T *w, std::size_t cols, std::size_t count, const float *const *x, float *const *y,
                        std::size_t at) {
  std::size_t r = 0;
  for (; r + ROWS <= count; r += ROWS) {
    tile<ROWS, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
  for (; r < count; ++r) {
    tile<1, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
}

template <class T>
void dot(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens, float *const *y,
         std::size_t at) {
  std::size_t t = 0;
  if constexpr (TILE_VECTORS > 1) {
    for (; t + TILE_VECTORS <= tokens; t += TILE_VECTORS) {
      tiles<TILE_ROWS, TILE_VECTORS>(w, cols, count, x + t, y + t, at);
    }
  }
  for (; t < tokens; ++t) {
    tiles<ROWS_ALONE, 1>(w, cols, count, x + t, y + t, at);
  }
}

template <std::size_t ROWS, class T>
WASTE_INLINE void tile_f64(const T *w, std::size_t cols, const float *x, double *y) {
  Doubles acc[ROWS][WIDE_PARTS]{};
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t k = 0; k < whole; k += LANES) {
    for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
      const Doubles v = doubles(x + k + p * DOUBLES);
      for (std::size_t r = 0; r < ROWS; ++r) {
        acc[r][p] += doubles(w + r * cols + k + p * DOUBLES) * v;
      }
    }
  }
  if (whole < cols) {
    const Rest<float> v(x, whole, cols);
    for (std::size_t r = 0; r < ROWS; ++r) {
      const Rest<T> row(w + r * cols, whole, cols);
      for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
        acc[r][p] += doubles(row.of + p * DOUBLES) * doubles(v.of + p * DOUBLES);
      }
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r) {
    y[r] = sum(acc[r]);
  }
}

template <class T>
void dot_f64(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
             double *const *y, std::size_t at) {
  constexpr std::size_t ROWS = 8 / WIDE_PARTS; // share a conversion of the vector
  for (std::size_t t = 0; t < tokens; ++t) {
    std::size_t r = 0;
    if constexpr (ROWS > 1) {
      for (; r + ROWS <= count; r += ROWS) {
        tile_f64<ROWS>(w + r * cols, cols, x[t], y[t] + at + r);
      }
    }
    for (; r < count; ++r) {
      tile_f64<1>(w + r * cols, cols, x[t], y[t] + at + r);
    }
  }
}

} // namespace

const RowLanes ROWS = {dot<float>, dot<std::uint16_t>, dot_f64<float>, dot_f64<std::uint16_t>};

} // namespace waste::WASTE_ISA
