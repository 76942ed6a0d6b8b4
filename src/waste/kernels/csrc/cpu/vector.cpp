// Norms, the gated activation and rotation, on vectors of any length.
#include "vector.hpp"

#include "lanes/lanes.hpp"

#include <cmath>

namespace waste {

double sum_squares(const float *x, std::size_t n) { return lanes().vector.sum_squares(x, n); }

void rms_norm(const float *x, const float *w, std::size_t n, double eps, float *out) {
  lanes().vector.rms_norm(x, w, n, eps, out);
}

void swiglu(float *gate, const float *up, std::size_t n, float limit) { lanes().vector.swiglu(gate, up, n, limit); }

void scale(float *x, std::size_t n, float scale) { lanes().vector.scale(x, n, scale); }

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
