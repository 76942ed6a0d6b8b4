// Small functions on whole vectors, shared by the stages. Lengths are arbitrary.
#pragma once

#include <cstddef>

namespace waste {

// Sum of squares, in float64.
double sum_squares(const float *x, std::size_t n);

// out = x / sqrt(mean(x^2) + eps) * w; statistics and the product in float64. out may be x.
void rms_norm(const float *x, const float *w, std::size_t n, double eps, float *out);

// gate = silu(min(gate, limit)) * clamp(up, -limit, limit). limit may be infinite.
void swiglu(float *gate, const float *up, std::size_t n, float limit);

// x *= scale.
void scale(float *x, std::size_t n, float scale);

// Rotate the adjacent pairs (2i, 2i + 1) of x (dim) by position * inv_freq[i]: the product in float32, as
// transformers forms it; its cosine and sine in float64.
void rotate(float *x, std::size_t dim, std::size_t position, const float *inv_freq);

} // namespace waste
