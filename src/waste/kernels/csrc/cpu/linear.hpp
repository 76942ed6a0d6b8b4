// Matrix products over a chunk of tokens: several independent ones as one parallel loop.
#pragma once

#include "dot.hpp"
#include "pool.hpp"

#include <span>

namespace waste {

// y[t][row - begin] = w[row] . x[t] for rows begin <= row < end. Vectors are given one pointer each, so that they
// may lie anywhere: rows of a matrix, heads of a query, the tokens of an expert.
//
// With a gate: y = silu(min(gate[row] . x[t], limit)) * clamp(w[row] . x[t], -limit, limit), for two matrices of one
// shape that can_gate says yes to. Neither product is written to memory.
struct Product {
  const Weight *w;
  const float *const *x;
  float *const *y;
  std::size_t tokens;
  std::size_t begin;
  std::size_t end;
  const Weight *gate = nullptr;
  float limit = 0.0f;
};

// All rows of w.
inline Product product(const Weight &w, const float *const *x, float *const *y, std::size_t tokens) {
  return Product{&w, x, y, tokens, 0, w.rows};
}

// Whether both take the same inputs of 8 bits.
inline bool can_gate(const Weight &gate, const Weight &up) {
  return strips(gate.format) && strips(up.format) && rotated(gate.format) == rotated(up.format);
}

// Pointers to `count` rows of a matrix, `stride` numbers apart.
template <class T> T **rows_of(Stage &stage, T *base, std::size_t stride, std::size_t count) {
  T **rows = stage.array<T *>(count);
  for (std::size_t i = 0; i < count; ++i) {
    rows[i] = base + i * stride;
  }
  return rows;
}

// Products with strip formats take inputs of 8 bits (int8.hpp), the others float32. Ends the life of the stage's
// passing floats.
void multiply(Stage &stage, std::span<const Product> products);

// One product accumulated in float64: for logits that end in a choice.
void multiply_f64(Stage &stage, const Weight &w, const float *const *x, double *const *y, std::size_t tokens);

// y (T, rows) = x (T, cols) @ w^T, both row-major.
void linear(Pool &pool, const float *x, const Weight &w, float *y, std::size_t tokens);

} // namespace waste
