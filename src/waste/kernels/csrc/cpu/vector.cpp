// Norms, the gated activation and rotation, on vectors of any length.
#include "vector.hpp"

#include "simd.hpp"

#include <cmath>

namespace waste {

WASTE_CLONES double sum_squares(const float *x, std::size_t n) {
  f64x8 low{}, high{};
  const std::size_t whole = n / LANES * LANES;
  for (std::size_t i = 0; i < whole; i += LANES) {
    const f64x8 a = widen(x + i), b = widen(x + i + 8);
    low += a * a;
    high += b * b;
  }
  if (whole < n) {
    float part[LANES];
    store(part, load_part(x + whole, n - whole));
    const f64x8 a = widen(part), b = widen(part + 8);
    low += a * a;
    high += b * b;
  }
  return sum(low + high);
}

WASTE_CLONES void rms_norm(const float *x, const float *w, std::size_t n, double eps, float *out) {
  const double inverse = 1.0 / std::sqrt(sum_squares(x, n) / static_cast<double>(n) + eps);
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(x[i] * inverse * w[i]);
  }
}

WASTE_CLONES void swiglu(float *gate, const float *up, std::size_t n, float limit) {
  const f32x16 top = all(limit), bottom = all(-limit);
  for (std::size_t i = 0; i < n; i += LANES) {
    const std::size_t count = n - i < LANES ? n - i : LANES;
    f32x16 g = load_part(gate + i, count), u = load_part(up + i, count);
    g = g > top ? top : g;
    u = u > top ? top : u;
    u = u < bottom ? bottom : u;
    store_part(gate + i, silu(g) * u, count);
  }
}

void scale(float *x, std::size_t n, float scale) {
  for (std::size_t i = 0; i < n; ++i) {
    x[i] *= scale;
  }
}

void rotate(float *x, std::size_t dim, std::size_t position, const float *inv_freq) {
  for (std::size_t i = 0; i < dim / 2; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];
    const float c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

} // namespace waste
