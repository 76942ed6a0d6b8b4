// The loops of Kimi delta attention over one head: convolution, gates, the delta rule.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

void convolve(const float *in, const float *past, const float *kernel, std::size_t t, std::size_t taps,
              std::size_t stride, std::size_t dim, float *out) {
  for (std::size_t c = 0; c < dim; ++c) {
    out[c] = 0.0f;
  }
  for (std::size_t j = 0; j < taps; ++j) {
    // Tap j looks at token t - (taps - 1) + j: in the chunk from taps - 1 - t on, before it in the past.
    const float *row = t + j + 1 >= taps ? in + (t + j + 1 - taps) * stride : past + (t + j) * stride;
    for (std::size_t c = 0; c < dim; ++c) {
      out[c] += kernel[c * taps + j] * row[c];
    }
  }
  each(dim, [=](std::size_t c, std::size_t count) __attribute__((always_inline)) {
    store_some(out + c, silu(some(out + c, count)), count);
  });
}

// Two passes over S.
void step(float *__restrict s, std::size_t dim, const float *__restrict q, const float *__restrict k,
          const float *__restrict v, const float *__restrict decay, float beta, float *__restrict delta,
          float *__restrict out) {
  for (std::size_t j = 0; j < dim; ++j) {
    delta[j] = 0.0f;
    out[j] = 0.0f;
  }
  for (std::size_t i = 0; i < dim; ++i) {
    const float key = k[i] * decay[i];
    const float *row = s + i * dim;
    for (std::size_t j = 0; j < dim; ++j) {
      delta[j] += key * row[j];
    }
  }
  for (std::size_t j = 0; j < dim; ++j) {
    delta[j] = beta * (v[j] - delta[j]);
  }
  for (std::size_t i = 0; i < dim; ++i) {
    const float keep = decay[i], key = k[i], query = q[i];
    float *row = s + i * dim;
    for (std::size_t j = 0; j < dim; ++j) {
      row[j] = keep * row[j] + key * delta[j];
      out[j] += query * row[j];
    }
  }
}

void gate(float *x, const float *gate, std::size_t dim) {
  each(dim, [=](std::size_t c, std::size_t count) __attribute__((always_inline)) {
    store_some(x + c, some(x + c, count) * sigmoid(some(gate + c, count)), count);
  });
}

void bounded_decay(const float *f, const float *bias, float rate, float bound, std::size_t dim, float *decay) {
  each(dim, [=](std::size_t c, std::size_t count) __attribute__((always_inline)) {
    const Floats x = (some(f + c, count) + some(bias + c, count)) * rate;
    store_some(decay + c, exp(sigmoid(x) * bound), count);
  });
}

} // namespace

const KdaLanes KDA = {convolve, step, gate, bounded_decay};

} // namespace waste::WASTE_ISA
