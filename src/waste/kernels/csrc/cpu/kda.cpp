// KDA: projections, then one item per head (convolution, gates, delta rule, gated norm), then the output.
#include "kda.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "vector.hpp"

#include <algorithm>
#include <cmath>

namespace waste {

namespace {

// One projection of one head: where its columns lie in the chunk, in the state and in the kernel.
struct Lane {
  const float *in;     // (T, stride), this head's first channel
  float *past;         // (taps - 1, stride)
  const float *kernel; // (head_dim, taps)
};

// softplus with the float32 convention that it is the identity above 20.
double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

void free_decay(const float *f, const float *bias, double rate, std::size_t dim, float *decay) {
  for (std::size_t c = 0; c < dim; ++c) {
    decay[c] = static_cast<float>(std::exp(-rate * softplus(static_cast<double>(f[c]) + bias[c])));
  }
}

// x / sqrt(sum(x^2) + 1e-6) * scale: the epsilon is inside the root.
void unit(float *x, std::size_t dim, double factor) {
  const double inverse = factor / std::sqrt(sum_squares(x, dim) + 1e-6);
  for (std::size_t c = 0; c < dim; ++c) {
    x[c] = static_cast<float>(x[c] * inverse);
  }
}

// The last taps - 1 inputs become the past. Reads never lie behind writes: entry i comes from entry i + T.
void advance(const Lane &lane, std::size_t tokens, std::size_t taps, std::size_t stride, std::size_t dim) {
  for (std::size_t i = 0; i + 1 < taps; ++i) {
    const float *from = i + tokens + 1 >= taps ? lane.in + (i + tokens + 1 - taps) * stride
                                               : lane.past + (i + tokens) * stride;
    std::copy(from, from + dim, lane.past + i * stride);
  }
}

// Bounds scratch memory, whatever the length of the prompt: 12.6 MB for 8192 channels.
constexpr std::size_t CHUNK = TOKENS;

void chunk(Stage &stage, const float *x, const KdaWeights &w, const KdaDims &d, const KdaState &state, float *out,
           float *scratch) {
  const std::size_t t = d.tokens, n = d.heads, dim = d.head_dim, c = n * dim;
  float *mixed[3], *f = scratch, *gate = f + t * c, *low_f = gate + t * c, *low_g = low_f + t * w.f_a->rows;
  float *beta = low_g + t * w.g_a->rows, *y = beta + t * n, *work = y + t * c;
  for (std::size_t i = 0; i < 3; ++i) {
    mixed[i] = work + i * t * c;
  }
  work += 3 * t * c;
  const float *const *rows = rows_of(stage, x, d.dim, t);
  const Product first[] = {
      product(*w.q, rows, rows_of(stage, mixed[0], c, t), t),
      product(*w.k, rows, rows_of(stage, mixed[1], c, t), t),
      product(*w.v, rows, rows_of(stage, mixed[2], c, t), t),
      product(*w.f_a, rows, rows_of(stage, low_f, w.f_a->rows, t), t),
      product(*w.g_a, rows, rows_of(stage, low_g, w.g_a->rows, t), t),
      product(*w.b, rows, rows_of(stage, beta, n, t), t),
  };
  multiply(stage, first);
  const Product second[] = {
      product(*w.f_b, rows_of<const float>(stage, low_f, w.f_a->rows, t), rows_of(stage, f, c, t), t),
      product(*w.g_b, rows_of<const float>(stage, low_g, w.g_a->rows, t), rows_of(stage, gate, c, t), t),
  };
  multiply(stage, second);

  const KdaLanes &loops = lanes().kda;
  stage.parallel(n, t * c * (2 * dim + 32), [&](std::size_t head, std::size_t worker) {
    const std::size_t at = head * dim;
    const float *kernels[3] = {w.q_conv, w.k_conv, w.v_conv};
    Lane lanes[3];
    for (std::size_t i = 0; i < 3; ++i) {
      lanes[i] = Lane{mixed[i] + at, state.conv + i * (d.taps - 1) * c + at, kernels[i] + at * d.taps};
    }
    float *q = work + worker * 5 * dim, *k = q + dim, *v = k + dim, *decay = v + dim, *delta = decay + dim;
    float *streams[3] = {q, k, v};
    const double rate = std::exp(static_cast<double>(w.a_log[head]));
    for (std::size_t i = 0; i < t; ++i) {
      for (std::size_t p = 0; p < 3; ++p) {
        loops.convolve(lanes[p].in, lanes[p].past, lanes[p].kernel, i, d.taps, c, dim, streams[p]);
      }
      unit(q, dim, 1.0 / std::sqrt(static_cast<double>(dim)));
      unit(k, dim, 1.0);
      if (d.bounded) {
        loops.bounded_decay(f + i * c + at, w.dt_bias + at, static_cast<float>(rate), static_cast<float>(d.bound), dim,
                          decay);
      } else {
        free_decay(f + i * c + at, w.dt_bias + at, rate, dim, decay);
      }
      const double open = 1.0 / (1.0 + std::exp(-static_cast<double>(beta[i * n + head])));
      float *o = y + i * c + at;
      loops.step(state.s + head * dim * dim, dim, q, k, v, decay, static_cast<float>(open), delta, o);
      rms_norm(o, w.norm, dim, d.norm_eps, o);
      loops.gate(o, gate + i * c + at, dim);
    }
    for (const Lane &lane : lanes) {
      advance(lane, t, d.taps, c, dim);
    }
  });

  const Product last = product(*w.o, rows_of<const float>(stage, y, c, t), rows_of(stage, out, d.dim, t), t);
  multiply(stage, {&last, 1});
}

} // namespace

void kda(Pool &pool, const float *x, const KdaWeights &w, const KdaDims &dims, const KdaState &state, float *out) {
  Stage stage(pool);
  const std::size_t c = dims.heads * dims.head_dim, most = std::min(dims.tokens, CHUNK);
  const std::size_t per_token = 6 * c + w.f_a->rows + w.g_a->rows + dims.heads;
  float *scratch = stage.floats(most * per_token + stage.threads() * 5 * dims.head_dim);
  for (std::size_t t = 0; t < dims.tokens; t += CHUNK) {
    KdaDims part = dims;
    part.tokens = std::min(CHUNK, dims.tokens - t);
    chunk(stage, x + t * dims.dim, w, part, state, out + t * dims.dim, scratch);
  }
}

} // namespace waste
