// Products of rows of f32 and bf16 matrices with some vectors, and decoding of every format.
#pragma once

#include "weight.hpp"

namespace waste {

constexpr std::size_t TOKENS = 64; // most vectors of one call

// y[t][row - first] = sum over k of w[row, k] * x[t][k], for rows begin <= row < end and t < tokens <= TOKENS of a
// row-major matrix. Accumulates in float32, in an order that depends on the format and on cols alone.
void dot_rows(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
              float *const *y, std::size_t first);

// y[t][row], accumulated in float64, for what ends in a choice.
void dot_rows_f64(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
                  double *const *y);

// Row `row` of the matrix as floats: out (cols).
void decode_row(const Weight &w, std::size_t row, float *out);

// The rows of the 16-row block `block` as floats: out (rows there, cols).
void decode_block(const Weight &w, std::size_t block, float *out);

} // namespace waste
