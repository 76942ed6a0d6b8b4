// KDA: projections, then one item per head (convolution, gates, delta rule, gated norm), then the output.
//
// Columns of a head's state never meet, so they pass block by block over all tokens of the chunk while they stay in
// registers and the first-level cache: the state is read from memory and written to it once per chunk. Tokens that come
// alone take the same steps, so their grouping changes no bit.
#include "kda.hpp"

#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "simd.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace waste {

namespace {

// One projection of one head: where its columns lie in the chunk, in the state and in the kernel.
struct Lane {
  const float *in;     // (T, stride), this head's first channel
  float *past;         // (taps - 1, stride)
  const float *kernel; // (head_dim, taps)
};

// kernel (dim, taps) -> out (taps, wide), zeros from dim on.
void turn(const float *kernel, std::size_t taps, std::size_t dim, std::size_t wide, float *out) {
  std::memset(out, 0, taps * wide * sizeof(float));
  if (taps == 4) { // all that models have: a loop the compiler turns into shuffles
    for (std::size_t c = 0; c < dim; ++c) {
      for (std::size_t j = 0; j < 4; ++j) {
        out[j * wide + c] = kernel[c * 4 + j];
      }
    }
    return;
  }
  for (std::size_t c = 0; c < dim; ++c) {
    for (std::size_t j = 0; j < taps; ++j) {
      out[j * wide + c] = kernel[c * taps + j];
    }
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

// Rows of `from` floats as rows of `to` floats, the first `count` of each.
void restride(const float *source, std::size_t from, float *target, std::size_t to, std::size_t count,
              std::size_t rows) {
  for (std::size_t i = 0; i < rows; ++i) {
    std::copy_n(source + i * from, count, target + i * to);
  }
}

// Scratch of a thread: everything of one head, heads of any size in rows of `wide`.
struct Bench {
  std::size_t wide;
  float *q, *k, *v, *decay, *ask, *o; // (T, wide)
  float *beta;                        // (T)
  float *kernel;                      // (taps, wide)
  float *state;                       // (head_dim, wide)
  float *work;                        // (head_dim, KDA_COLUMNS)

  static std::size_t floats(std::size_t tokens, const KdaDims &d) {
    const std::size_t wide = ceil_div(d.head_dim, LANES) * LANES;
    return (6 * tokens + d.taps + d.head_dim) * wide + ceil_div(tokens, LANES) * LANES + d.head_dim * KDA_COLUMNS;
  }

  Bench(float *memory, std::size_t tokens, const KdaDims &d) : wide(ceil_div(d.head_dim, LANES) * LANES) {
    for (float **part : {&q, &k, &v, &decay, &ask, &o}) {
      *part = memory;
      memory += tokens * wide;
    }
    kernel = memory;
    state = kernel + d.taps * wide;
    work = state + d.head_dim * wide;
    beta = work + d.head_dim * KDA_COLUMNS;
  }
};

// All tokens of the bench over the state of one head (head_dim, head_dim).
void pass(const Bench &b, float *s, std::size_t dim, std::size_t tokens) {
  if (b.wide == dim) {
    lanes().kda.steps(s, dim, tokens, dim, b.q, b.k, b.decay, b.ask, b.v, b.beta, b.work, b.o);
    return;
  }
  std::memset(b.state, 0, dim * b.wide * sizeof(float));
  restride(s, dim, b.state, b.wide, dim, dim);
  lanes().kda.steps(b.state, dim, tokens, b.wide, b.q, b.k, b.decay, b.ask, b.v, b.beta, b.work, b.o);
  restride(b.state, b.wide, s, dim, dim, dim);
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
  const VectorLanes &vectors = lanes().vector;
  stage.parallel(n, t * c * (2 * dim + 32), [&](std::size_t head, std::size_t worker) {
    const std::size_t at = head * dim;
    const float *kernels[3] = {w.q_conv, w.k_conv, w.v_conv};
    const Bench b(work + worker * Bench::floats(t, d), t, d);
    float *streams[3] = {b.q, b.k, b.v};
    for (std::size_t i = 0; i < 3; ++i) {
      const Lane lane{mixed[i] + at, state.conv + i * (d.taps - 1) * c + at, kernels[i] + at * d.taps};
      turn(lane.kernel, d.taps, dim, b.wide, b.kernel);
      loops.convolve(lane.in, lane.past, b.kernel, t, d.taps, c, dim, b.wide, streams[i]);
      advance(lane, t, d.taps, c, dim);
    }
    loops.unit(b.q, t, b.wide, 1.0 / std::sqrt(static_cast<double>(dim)));
    loops.unit(b.k, t, b.wide, 1.0);
    loops.decay(f + at, c, w.dt_bias + at, std::exp(w.a_log[head]), d.bounded, static_cast<float>(d.bound), t, dim,
              b.wide, b.k, b.decay, b.ask);
    for (std::size_t i = 0; i < t; ++i) {
      b.beta[i] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(beta[i * n + head]))));
    }
    pass(b, state.s + head * dim * dim, dim, t);
    for (std::size_t i = 0; i < t; ++i) {
      float *o = y + i * c + at;
      for (std::size_t j = 0; j < dim; j += LANES) {
        __builtin_prefetch(o + KDA_AHEAD * c + j, 1);
        __builtin_prefetch(gate + (i + KDA_AHEAD) * c + at + j);
      }
      vectors.rms_norm(b.o + i * b.wide, w.norm, dim, d.norm_eps, o);
      loops.gate(o, gate + i * c + at, dim);
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
  float *scratch = stage.floats(most * per_token + stage.threads() * Bench::floats(most, dims));
  for (std::size_t t = 0; t < dims.tokens; t += CHUNK) {
    KdaDims part = dims;
    part.tokens = std::min(CHUNK, dims.tokens - t);
    chunk(stage, x + t * dims.dim, w, part, state, out + t * dims.dim, scratch);
  }
}

void delta_rule(Pool &pool, const DeltaRule &r, const KdaDims &dims, float *s, float *out) {
  Stage stage(pool);
  const std::size_t dim = dims.head_dim, stride = dims.heads * dim, most = std::min(dims.tokens, CHUNK);
  float *scratch = stage.floats(stage.threads() * Bench::floats(most, dims));
  stage.parallel(dims.heads, dims.tokens * stride * dim * 4, [&](std::size_t head, std::size_t worker) {
    const Bench b(scratch + worker * Bench::floats(most, dims), most, dims);
    std::fill_n(b.q, 6 * most * b.wide, 0.0f);
    for (std::size_t first = 0; first < dims.tokens; first += CHUNK) {
      const std::size_t t = std::min(CHUNK, dims.tokens - first), at = first * stride + head * dim;
      restride(r.q + at, stride, b.q, b.wide, dim, t);
      restride(r.k + at, stride, b.k, b.wide, dim, t);
      restride(r.v + at, stride, b.v, b.wide, dim, t);
      restride(r.decay + at, stride, b.decay, b.wide, dim, t);
      for (std::size_t i = 0; i < t * b.wide; ++i) {
        b.ask[i] = b.k[i] * b.decay[i];
      }
      for (std::size_t i = 0; i < t; ++i) {
        b.beta[i] = r.beta[(first + i) * dims.heads + head];
      }
      pass(b, s + head * dim * dim, dim, t);
      restride(b.o, b.wide, out + at, stride, dim, t);
    }
  });
}

} // namespace waste
