// Hyper-connections as transformers' glm5_next computes them; the small matrices in float64.
#include "hyper.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"

#include <algorithm>
#include <cmath>

namespace waste {

namespace {

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// C[k, i] /= sum over k of C[k, i] + eps
void normalize_columns(double *c, std::size_t n, double eps) {
  for (std::size_t i = 0; i < n; ++i) {
    double total = eps;
    for (std::size_t k = 0; k < n; ++k) {
      total += c[k * n + i];
    }
    for (std::size_t k = 0; k < n; ++k) {
      c[k * n + i] /= total;
    }
  }
}

// C[k, i] /= sum over i of C[k, i] + eps
void normalize_rows(double *c, std::size_t n, double eps) {
  for (std::size_t k = 0; k < n; ++k) {
    double total = eps;
    for (std::size_t i = 0; i < n; ++i) {
      total += c[k * n + i];
    }
    for (std::size_t i = 0; i < n; ++i) {
      c[k * n + i] /= total;
    }
  }
}

// The mixing matrix: softmax over the second index, then Sinkhorn, beginning and ending on columns.
void mixing(const float *m, double scale, const float *base, const HcParams &p, std::size_t n, float *comb) {
  double c[HC_STREAMS * HC_STREAMS];
  for (std::size_t k = 0; k < n; ++k) {
    double top = -HUGE_VAL, total = 0;
    for (std::size_t i = 0; i < n; ++i) {
      c[k * n + i] = m[k * n + i] * scale + base[k * n + i];
      top = std::max(top, c[k * n + i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      total += c[k * n + i] = std::exp(c[k * n + i] - top);
    }
    for (std::size_t i = 0; i < n; ++i) {
      c[k * n + i] = c[k * n + i] / total + p.eps;
    }
  }
  normalize_columns(c, n, p.eps);
  for (int round = 1; round < p.iterations; ++round) {
    normalize_rows(c, n, p.eps);
    normalize_columns(c, n, p.eps);
  }
  for (std::size_t i = 0; i < n * n; ++i) {
    comb[i] = static_cast<float>(c[i]);
  }
}

} // namespace

void hc_pre(Pool &pool, const float *streams, const HcParams &params, const HcDims &dims, float *y, float *post,
            float *comb) {
  Stage stage(pool);
  const std::size_t n = dims.streams, wide = n * dims.dim, outputs = 2 * n + n * n;
  const Weight fn{reinterpret_cast<const std::uint8_t *>(params.fn), Format::f32, outputs, wide};
  float *mapped = stage.floats(dims.tokens * outputs);
  const Product p = product(fn, rows_of(stage, streams, wide, dims.tokens),
                            rows_of(stage, mapped, outputs, dims.tokens), dims.tokens);
  multiply(stage, {&p, 1});
  const VectorLanes &vector = lanes().vector;
  const StreamLanes &sums = lanes().streams;
  stage.parallel(dims.tokens, dims.tokens * wide, [&](std::size_t t, std::size_t) {
    const float *x = streams + t * wide;
    float *m = mapped + t * outputs;
    // The product is linear: norming its result saves a pass over the streams.
    const double inverse =
        1.0 / std::sqrt(vector.sum_squares(x, wide) / static_cast<double>(wide) + params.stream_eps);
    for (std::size_t i = 0; i < outputs; ++i) {
      m[i] = static_cast<float>(m[i] * inverse);
    }
    mixing(m + 2 * n, params.scale[2], params.base + 2 * n, params, n, comb + t * n * n);
    float share[HC_STREAMS];
    for (std::size_t s = 0; s < n; ++s) {
      const float *base = params.base;
      const double pre = logistic(static_cast<double>(m[s]) * params.scale[0] + base[s]) + params.eps;
      post[t * n + s] =
          static_cast<float>(2.0 * logistic(static_cast<double>(m[n + s]) * params.scale[1] + base[n + s]));
      share[s] = static_cast<float>(pre);
    }
    float *total = y + t * dims.dim;
    sums.weighted(x, dims.dim, share, n, nullptr, dims.dim, total);
    vector.rms_norm(total, params.norm, dims.dim, params.norm_eps, total);
  });
}

void hc_post(Pool &pool, float *streams, const float *out, const float *post, const float *comb,
             const HcDims &dims) {
  constexpr std::size_t run = 1024; // columns per item
  const std::size_t n = dims.streams, runs = ceil_div(dims.dim, run);
  const StreamLanes &sums = lanes().streams;
  Stage stage(pool);
  stage.parallel(dims.tokens * runs, dims.tokens * n * n * dims.dim, [&](std::size_t item, std::size_t) {
    const std::size_t t = item / runs, begin = item % runs * run, count = std::min(run, dims.dim - begin);
    float *to = streams + t * n * dims.dim + begin;
    sums.mix(to, dims.dim, post + t * n, comb + t * n * n, n, out + t * dims.dim + begin,
             count);
  });
}

} // namespace waste
