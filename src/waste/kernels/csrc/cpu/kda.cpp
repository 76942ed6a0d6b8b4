// KDA: projections, then one item per head (convolution, gates, delta rule, gated norm), then the output.
//
// Columns of a head's state never meet, so they pass block by block over all tokens of the chunk while they stay in
// registers and the first-level cache: the state is read from memory and written to it once per chunk. Tokens that come
// alone take the same steps, so their grouping changes no bit.
#include "kda.hpp"

#include "linear.hpp"
#include "simd.hpp"
#include "tile.hpp"
#include "vector.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace waste {

// Tokens of a chunk lie in pages of their own, where no hardware prefetcher finds the next one.
constexpr std::size_t AHEAD = 8;

// out (T, wide) = silu of the causal convolution of in (T, stride), zeros from dim on. kernel (taps, wide).
WASTE_CLONES void kda_convolve(const float *in, const float *past, const float *kernel, std::size_t tokens,
                               std::size_t taps, std::size_t stride, std::size_t dim, std::size_t wide, float *out) {
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < wide; c += LANES) {
      const std::size_t count = dim - c < LANES ? dim - c : LANES;
      f32x16 sum{};
      __builtin_prefetch(in + (t + AHEAD) * stride + c);
      for (std::size_t j = 0; j < taps; ++j) {
        // Tap j looks at token t - (taps - 1) + j: in the chunk from taps - 1 - t on, before it in the past.
        const float *row = t + j + 1 >= taps ? in + (t + j + 1 - taps) * stride : past + (t + j) * stride;
        sum += load<f32x16>(kernel + j * wide + c) * load_part(row + c, count);
      }
      store(out + t * wide + c, silu(sum));
    }
  }
}

// x (T, wide) / sqrt(sum(x^2) + 1e-6) * factor, in float64: the epsilon is inside the root.
WASTE_CLONES void kda_unit(float *x, std::size_t tokens, std::size_t wide, double factor) {
  for (float *row = x; row < x + tokens * wide; row += wide) {
    f64x8 low{}, high{};
    for (std::size_t c = 0; c < wide; c += LANES) {
      const f64x8 a = widen(row + c), b = widen(row + c + 8);
      low += a * a;
      high += b * b;
    }
    const double inverse = factor / __builtin_sqrt(sum(low + high) + 1e-6);
    for (std::size_t c = 0; c < wide; c += 8) {
      store(row + c, __builtin_convertvector(widen(row + c) * inverse, f32x8));
    }
  }
}

namespace {

// log(1 + e^x), by 2 atanh(u / (2 + u)) = log(1 + u) for u = e^-|x|: eight terms of its series are exact to 2e-9.
WASTE_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 u = exp(x < 0.0f ? x : -x), s = u / (u + 2.0f), z = s * s;
  f32x16 series = z * (1.0f / 15) + 1.0f / 13;
  series = series * z + 1.0f / 11;
  series = series * z + 1.0f / 9;
  series = series * z + 1.0f / 7;
  series = series * z + 1.0f / 5;
  series = series * z + 1.0f / 3;
  series = series * z + 1.0f;
  return (x > 0.0f ? x : f32x16{}) + 2.0f * s * series;
}

} // namespace

// decay (T, wide) = exp(bound * sigmoid(rate * (f + bias))) if bounded, else exp(-rate * softplus(f + bias)), and
// ask = k * decay: what the decayed state is asked for. f (T, stride).
WASTE_CLONES void kda_decay(const float *f, std::size_t stride, const float *bias, float rate, bool bounded,
                            float bound, std::size_t tokens, std::size_t dim, std::size_t wide, const float *k,
                            float *decay, float *ask) {
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < wide; c += LANES) {
      const std::size_t count = dim - c < LANES ? dim - c : LANES, at = t * wide + c;
      __builtin_prefetch(f + (t + AHEAD) * stride + c);
      const f32x16 x = load_part(f + t * stride + c, count) + load_part(bias + c, count);
      const f32x16 kept = bounded ? exp(sigmoid(x * rate) * bound) : exp(softplus(x) * -rate);
      store(decay + at, kept);
      store(ask + at, kept * load<f32x16>(k + at));
    }
  }
}

// x *= sigmoid(gate)
WASTE_CLONES void kda_gate(float *x, const float *gate, std::size_t dim) {
  for (std::size_t c = 0; c < dim; c += LANES) {
    const std::size_t count = dim - c < LANES ? dim - c : LANES;
    store_part(x + c, load_part(x + c, count) * sigmoid(load_part(gate + c, count)), count);
  }
}

namespace {

// One token and N vectors of columns. A row of the state is loaded once: it decays, takes its share of the correction,
// answers the query, and tells what the next token will find known of its value.
// Fused multiply-adds would gain 15 % of a chunk and nothing of a token, which memory bounds: not worth bits that
// depend on the instruction set.
template <class V, std::size_t N, bool LAST>
WASTE_INLINE void one_token(const float *from, std::size_t from_stride, float *to, std::size_t to_stride,
                            std::size_t keys, const float *q, const float *k, const float *decay, const float *next,
                            const V (&delta)[N], V (&known)[N], float *out) {
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  V answer[N]{};
  for (std::size_t n = 0; n < N; ++n) {
    known[n] = V{};
  }
  for (std::size_t i = 0; i < keys; ++i) {
    // Less zero: in every lane (tile.hpp).
    const V keep = decay[i] - V{}, key = k[i] - V{}, query = q[i] - V{};
    const V ask = LAST ? V{} : next[i] - V{};
    for (std::size_t n = 0; n < N; ++n) {
      const V row = keep * load<V>(from + i * from_stride + n * lanes) + key * delta[n];
      store(to + i * to_stride + n * lanes, row);
      answer[n] += query * row;
      if constexpr (!LAST) {
        known[n] += ask * row;
      }
    }
  }
  for (std::size_t n = 0; n < N; ++n) {
    store(out + n * lanes, answer[n]);
  }
}

template <class V, std::size_t N>
WASTE_INLINE void columns(float *s, std::size_t stride, std::size_t keys, std::size_t tokens, std::size_t wide,
                          const float *q, const float *k, const float *decay, const float *ask, const float *v,
                          const float *beta, float *work, float *out) {
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  V known[N]{};
  for (std::size_t i = 0; i < keys; ++i) {
    for (std::size_t n = 0; n < N; ++n) {
      const V row = load<V>(s + i * stride + n * lanes);
      if (tokens > 1) {
        store(work + (i * N + n) * lanes, row);
      }
      known[n] += (ask[i] - V{}) * row;
    }
  }
  const float *from = tokens > 1 ? work : s;
  const std::size_t from_stride = tokens > 1 ? N * lanes : stride;
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t at = t * wide;
    V delta[N];
    for (std::size_t n = 0; n < N; ++n) {
      delta[n] = (load<V>(v + at + n * lanes) - known[n]) * beta[t];
    }
    if (t + 1 == tokens) {
      one_token<V, N, true>(from, from_stride, s, stride, keys, q + at, k + at, decay + at, nullptr, delta, known,
                            out + at);
    } else {
      one_token<V, N, false>(from, from_stride, work, N * lanes, keys, q + at, k + at, decay + at, ask + at + wide,
                             delta, known, out + at);
    }
  }
}

template <int LEVEL>
WASTE_INLINE void all_columns(float *s, std::size_t keys, std::size_t tokens, std::size_t wide, const float *q,
                              const float *k, const float *decay, const float *ask, const float *v, const float *beta,
                              float *work, float *out) {
  using T = Tile<LEVEL>;
  using V = typename T::V;
  constexpr std::size_t lanes = sizeof(V) / sizeof(float), block = T::VECTORS * lanes;
  std::size_t c = 0;
  for (; c + block <= wide; c += block) {
    columns<V, T::VECTORS>(s + c, wide, keys, tokens, wide, q, k, decay, ask, v + c, beta, work, out + c);
  }
  for (; c < wide; c += lanes) {
    columns<V, 1>(s + c, wide, keys, tokens, wide, q, k, decay, ask, v + c, beta, work, out + c);
  }
}

constexpr std::size_t COLUMNS = 64; // most of a block

} // namespace

// The delta rule of one head, token by token: s = decay (rows) * s; s += outer(k, beta * (v - k @ s)); out = q @ s.
// s (keys, wide); q, k, decay, ask = k * decay, v, out (T, wide), wide a multiple of 16; beta (T). work (keys, COLUMNS)
// is scratch: a block of columns in one piece, as rows of 512 bytes would share a quarter of the cache's sets.
WASTE_VERSIONS(void kda_steps(float *s, std::size_t keys, std::size_t tokens, std::size_t wide, const float *q,
                              const float *k, const float *decay, const float *ask, const float *v, const float *beta,
                              float *work, float *out),
               all_columns<LEVEL>(s, keys, tokens, wide, q, k, decay, ask, v, beta, work, out))

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
  float *work;                        // (head_dim, COLUMNS)

  static std::size_t floats(std::size_t tokens, const KdaDims &d) {
    const std::size_t wide = ceil_div(d.head_dim, LANES) * LANES;
    return (6 * tokens + d.taps + d.head_dim) * wide + ceil_div(tokens, LANES) * LANES + d.head_dim * COLUMNS;
  }

  Bench(float *memory, std::size_t tokens, const KdaDims &d) : wide(ceil_div(d.head_dim, LANES) * LANES) {
    for (float **part : {&q, &k, &v, &decay, &ask, &o}) {
      *part = memory;
      memory += tokens * wide;
    }
    kernel = memory;
    state = kernel + d.taps * wide;
    work = state + d.head_dim * wide;
    beta = work + d.head_dim * COLUMNS;
  }
};

// All tokens of the bench over the state of one head (head_dim, head_dim).
void pass(const Bench &b, float *s, std::size_t dim, std::size_t tokens) {
  if (b.wide == dim) {
    kda_steps(s, dim, tokens, dim, b.q, b.k, b.decay, b.ask, b.v, b.beta, b.work, b.o);
    return;
  }
  std::memset(b.state, 0, dim * b.wide * sizeof(float));
  restride(s, dim, b.state, b.wide, dim, dim);
  kda_steps(b.state, dim, tokens, b.wide, b.q, b.k, b.decay, b.ask, b.v, b.beta, b.work, b.o);
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

  stage.parallel(n, t * c * (2 * dim + 32), [&](std::size_t head, std::size_t worker) {
    const std::size_t at = head * dim;
    const float *kernels[3] = {w.q_conv, w.k_conv, w.v_conv};
    const Bench b(work + worker * Bench::floats(t, d), t, d);
    float *streams[3] = {b.q, b.k, b.v};
    for (std::size_t i = 0; i < 3; ++i) {
      const Lane lane{mixed[i] + at, state.conv + i * (d.taps - 1) * c + at, kernels[i] + at * d.taps};
      turn(lane.kernel, d.taps, dim, b.wide, b.kernel);
      kda_convolve(lane.in, lane.past, b.kernel, t, d.taps, c, dim, b.wide, streams[i]);
      advance(lane, t, d.taps, c, dim);
    }
    kda_unit(b.q, t, b.wide, 1.0 / std::sqrt(static_cast<double>(dim)));
    kda_unit(b.k, t, b.wide, 1.0);
    kda_decay(f + at, c, w.dt_bias + at, std::exp(w.a_log[head]), d.bounded, static_cast<float>(d.bound), t, dim,
              b.wide, b.k, b.decay, b.ask);
    for (std::size_t i = 0; i < t; ++i) {
      b.beta[i] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(beta[i * n + head]))));
    }
    pass(b, state.s + head * dim * dim, dim, t);
    for (std::size_t i = 0; i < t; ++i) {
      float *o = y + i * c + at;
      for (std::size_t j = 0; j < dim; j += LANES) {
        __builtin_prefetch(o + AHEAD * c + j, 1);
        __builtin_prefetch(gate + (i + AHEAD) * c + at + j);
      }
      rms_norm(b.o + i * b.wide, w.norm, dim, d.norm_eps, o);
      kda_gate(o, gate + i * c + at, dim);
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
