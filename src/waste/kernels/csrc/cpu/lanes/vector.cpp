// Norms, the gated activation and sums, on vectors of any length.
#include "lanes.hpp"

#include "../simd.hpp"

namespace waste::WASTE_ISA {

namespace {

double sum_squares(const float *x, std::size_t n) {
  f64x8 low{}, high{};
  const auto take = [&](const float *v) __attribute__((always_inline)) {
    const f64x8 a = widen(v), b = widen(v + 8);
    low += a * a;
    high += b * b;
  };
  std::size_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    take(x + i);
  }
  if (i < n) {
    float rest[LANES];
    store(rest, load_part(x + i, n - i));
    take(rest);
  }
  return sum(low + high);
}

// Statistics and the product in float64.
void rms_norm(const float *x, const float *w, std::size_t n, double eps, float *out) {
  const double inverse = 1.0 / __builtin_sqrt(sum_squares(x, n) / static_cast<double>(n) + eps);
  for (std::size_t i = 0; i < n; ++i) { // left to the compiler, which converts better than its own vector types do
    out[i] = static_cast<float>(x[i] * inverse * w[i]);
  }
}

void swiglu(float *gate, const float *up, std::size_t n, float limit) {
  const f32x16 top = all(limit), bottom = all(-limit);
  for (std::size_t i = 0; i < n; i += LANES) {
    const std::size_t count = part(n - i);
    f32x16 g = load_part(gate + i, count), u = load_part(up + i, count);
    g = g > top ? top : g;
    u = u > top ? top : u;
    u = u < bottom ? bottom : u;
    store_part(gate + i, silu(g) * u, count);
  }
}

void scale(float *x, std::size_t n, float scale) {
  for (std::size_t i = 0; i < n; i += LANES) {
    const std::size_t count = part(n - i);
    store_part(x + i, load_part(x + i, count) * scale, count);
  }
}

void add(const float *x, const float *y, std::size_t n, float *out) {
  for (std::size_t i = 0; i < n; i += LANES) {
    const std::size_t count = part(n - i);
    store_part(out + i, load_part(x + i, count) + load_part(y + i, count), count);
  }
}

} // namespace

const VectorLanes VECTOR = {sum_squares, rms_norm, swiglu, scale, add};

} // namespace waste::WASTE_ISA
