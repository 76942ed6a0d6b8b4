// Products of 16 weight rows with some vectors: the innermost loops of every matrix product.
#pragma once

#include "weight.hpp"

namespace waste {

constexpr std::size_t TOKENS = 64; // most vectors of one call

// y[t][row - first] = sum over k of w[row, k] * x[t][k], for rows begin <= row < end of the 16-row block `block`
// (begin and end count from the start of the matrix) and t < tokens <= TOKENS. For a rotated format x[t] comes from
// rotate_input. Accumulates in float32, in an order that depends on the format and on cols alone.
void dot_block(const Weight &w, std::size_t block, std::size_t begin, std::size_t end, const float *const *x,
               std::size_t tokens, float *const *y, std::size_t first);

// x (cols) as products with a rotated format take it: out (cols padded to 128).
void rotate_input(const float *x, std::size_t cols, float *out);

// The product accumulated in float64, for what ends in a choice. x as it is, whatever the format.
void dot_block_f64(const Weight &w, std::size_t block, std::size_t begin, std::size_t end, const float *const *x,
                   std::size_t tokens, double *const *y, std::size_t first);

// Row `row` of the matrix as floats: out (cols).
void decode_row(const Weight &w, std::size_t row, float *out);

// The rows of the 16-row block `block` as floats: out (rows there, cols).
void decode_block(const Weight &w, std::size_t block, float *out);

} // namespace waste
