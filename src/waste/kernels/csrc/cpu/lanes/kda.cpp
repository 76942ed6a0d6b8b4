// The loops of Kimi delta attention over one head: convolution, gates, the delta rule.
#include "lanes.hpp"

#include "tile.hpp"

namespace waste::WASTE_ISA {

namespace {

// Numbers of a register at c that belong to the `dim` there are.
WASTE_INLINE std::size_t there(std::size_t dim, std::size_t c) {
  return c + FLOATS <= dim ? FLOATS : c < dim ? dim - c : 0;
}

void convolve(const float *in, const float *past, const float *kernel, std::size_t tokens, std::size_t taps,
              std::size_t stride, std::size_t dim, std::size_t wide, float *out) {
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < wide; c += FLOATS) {
      const std::size_t count = there(dim, c);
      Floats sum{};
      __builtin_prefetch(in + (t + KDA_AHEAD) * stride + c);
      for (std::size_t j = 0; j < taps; ++j) {
        // Tap j looks at token t - (taps - 1) + j: in the chunk from taps - 1 - t on, before it in the past.
        const float *row = t + j + 1 >= taps ? in + (t + j + 1 - taps) * stride : past + (t + j) * stride;
        sum += floats(kernel + j * wide + c) * some(row + c, count);
      }
      store(out + t * wide + c, silu(sum));
    }
  }
}

void unit(float *x, std::size_t tokens, std::size_t wide, double factor) {
  using Half = float __attribute__((vector_size(sizeof(Doubles) / 2)));
  for (float *row = x; row < x + tokens * wide; row += wide) {
    Doubles total[WIDE_PARTS]{};
    for (std::size_t c = 0; c < wide; c += LANES) {
      for (std::size_t p = 0; p < WIDE_PARTS; ++p) {
        const Doubles part = doubles(row + c + p * DOUBLES);
        total[p] += part * part;
      }
    }
    const double inverse = factor / __builtin_sqrt(sum(total) + 1e-6);
    for (std::size_t c = 0; c < wide; c += DOUBLES) {
      store(row + c, __builtin_convertvector(doubles(row + c) * inverse, Half));
    }
  }
}

// log(1 + e^x), by 2 atanh(u / (2 + u)) = log(1 + u) for u = e^-|x|: eight terms of its series are exact to 2e-9.
WASTE_INLINE Floats softplus(Floats x) {
  const Floats u = exp(x < 0.0f ? x : -x), s = u / (u + 2.0f), z = s * s;
  Floats series = z * (1.0f / 15) + 1.0f / 13;
  series = series * z + 1.0f / 11;
  series = series * z + 1.0f / 9;
  series = series * z + 1.0f / 7;
  series = series * z + 1.0f / 5;
  series = series * z + 1.0f / 3;
  series = series * z + 1.0f;
  return (x > 0.0f ? x : Floats{}) + 2.0f * s * series;
}

void decay(const float *f, std::size_t stride, const float *bias, float rate, bool bounded, float bound,
           std::size_t tokens, std::size_t dim, std::size_t wide, const float *k, float *decay, float *ask) {
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t c = 0; c < wide; c += FLOATS) {
      const std::size_t count = there(dim, c), at = t * wide + c;
      __builtin_prefetch(f + (t + KDA_AHEAD) * stride + c);
      const Floats x = some(f + t * stride + c, count) + some(bias + c, count);
      const Floats kept = bounded ? exp(sigmoid(x * rate) * bound) : exp(softplus(x) * -rate);
      store(decay + at, kept);
      store(ask + at, kept * floats(k + at));
    }
  }
}

void gate(float *x, const float *gate, std::size_t dim) {
  each(dim, [=](std::size_t c, std::size_t count) __attribute__((always_inline)) {
    store_some(x + c, some(x + c, count) * sigmoid(some(gate + c, count)), count);
  });
}

// One token and N vectors of columns. A row of the state is loaded once: it decays, takes its share of the correction,
// answers the query, and tells what the next token will find known of its value.
// Fused multiply-adds would gain 15 % of a chunk and nothing of a token, which memory bounds: not worth bits that
// depend on the instruction set.
template <std::size_t N, bool LAST>
WASTE_INLINE void one_token(const float *from, std::size_t from_stride, float *to, std::size_t to_stride,
                            std::size_t keys, const float *q, const float *k, const float *decay, const float *next,
                            const Floats (&delta)[N], Floats (&known)[N], float *out) {
  Floats answer[N]{};
  for (std::size_t n = 0; n < N; ++n) {
    known[n] = Floats{};
  }
  for (std::size_t i = 0; i < keys; ++i) {
    // Less zero: in every lane (tile.hpp).
    const Floats keep = decay[i] - Floats{}, key = k[i] - Floats{}, query = q[i] - Floats{};
    const Floats ask = LAST ? Floats{} : next[i] - Floats{};
    for (std::size_t n = 0; n < N; ++n) {
      const Floats row = keep * floats(from + i * from_stride + n * FLOATS) + key * delta[n];
      store(to + i * to_stride + n * FLOATS, row);
      answer[n] += query * row;
      if constexpr (!LAST) {
        known[n] += ask * row;
      }
    }
  }
  for (std::size_t n = 0; n < N; ++n) {
    store(out + n * FLOATS, answer[n]);
  }
}

template <std::size_t N>
WASTE_INLINE void columns(float *s, std::size_t stride, std::size_t keys, std::size_t tokens, std::size_t wide,
                          const float *q, const float *k, const float *decay, const float *ask, const float *v,
                          const float *beta, float *work, float *out) {
  Floats known[N]{};
  for (std::size_t i = 0; i < keys; ++i) {
    for (std::size_t n = 0; n < N; ++n) {
      const Floats row = floats(s + i * stride + n * FLOATS);
      if (tokens > 1) {
        store(work + (i * N + n) * FLOATS, row);
      }
      known[n] += (ask[i] - Floats{}) * row;
    }
  }
  const float *from = tokens > 1 ? work : s;
  const std::size_t from_stride = tokens > 1 ? N * FLOATS : stride;
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t at = t * wide;
    Floats delta[N];
    for (std::size_t n = 0; n < N; ++n) {
      delta[n] = (floats(v + at + n * FLOATS) - known[n]) * beta[t];
    }
    if (t + 1 == tokens) {
      one_token<N, true>(from, from_stride, s, stride, keys, q + at, k + at, decay + at, nullptr, delta, known,
                            out + at);
    } else {
      one_token<N, false>(from, from_stride, work, N * FLOATS, keys, q + at, k + at, decay + at, ask + at + wide,
                             delta, known, out + at);
    }
  }
}

// A block of columns in one piece in `work`, as rows of 512 bytes would share a quarter of the cache's sets.
void steps(float *s, std::size_t keys, std::size_t tokens, std::size_t wide, const float *q, const float *k,
           const float *decay, const float *ask, const float *v, const float *beta, float *work, float *out) {
  constexpr std::size_t block = TILE_VECTORS * FLOATS;
  static_assert(block <= KDA_COLUMNS);
  std::size_t c = 0;
  for (; c + block <= wide; c += block) {
    columns<TILE_VECTORS>(s + c, wide, keys, tokens, wide, q, k, decay, ask, v + c, beta, work, out + c);
  }
  for (; c < wide; c += FLOATS) {
    columns<1>(s + c, wide, keys, tokens, wide, q, k, decay, ask, v + c, beta, work, out + c);
  }
}

} // namespace

const KdaLanes KDA = {convolve, unit, decay, gate, steps};

} // namespace waste::WASTE_ISA
