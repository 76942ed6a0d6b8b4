// Norms, the gated activation and sums, on vectors of any length.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

double sum_squares(const float *x, std::size_t n) {
  Doubles total[WIDE_PARTS]{};
  const auto take = [&](const float *v) __attribute__((always_inline)) {
    for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
      const Doubles a = doubles(v + p * DOUBLES);
      total[p] += a * a;
    }
  };
  std::size_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    take(x + i);
  }
  if (i < n) {
    float rest[LANES] = {};
    __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
    take(rest);
  }
  return sum(total);
}

// Statistics and the product in float64.
void rms_norm(const float *x, const float *w, std::size_t n, double eps, float *out) {
  const double inverse = 1.0 / __builtin_sqrt(sum_squares(x, n) / static_cast<double>(n) + eps);
  for (std::size_t i = 0; i < n; ++i) { // left to the compiler, which converts better than its own vector types do
    out[i] = static_cast<float>(x[i] * inverse * w[i]);
  }
}

void swiglu(float *gate, const float *up, std::size_t n, float limit) {
  const Floats top = Floats{} + limit, bottom = -top;
  each(n, [=](std::size_t i, std::size_t count) __attribute__((always_inline)) {
    Floats g = some(gate + i, count), u = some(up + i, count);
    g = g > top ? top : g;
    u = u > top ? top : u;
    u = u < bottom ? bottom : u;
    store_some(gate + i, silu(g) * u, count);
  });
}

void scale(float *x, std::size_t n, float scale) {
  each(n, [=](std::size_t i, std::size_t count) __attribute__((always_inline)) {
    store_some(x + i, some(x + i, count) * scale, count);
  });
}

void add(const float *x, const float *y, std::size_t n, float *out) {
  each(n, [=](std::size_t i, std::size_t count) __attribute__((always_inline)) {
    store_some(out + i, some(x + i, count) + some(y + i, count), count);
  });
}

} // namespace

const VectorLanes VECTOR = {sum_squares, rms_norm, swiglu, scale, add};

} // namespace waste::WASTE_ISA
