// Sums over several vectors: the mean and the mixing of residual streams, the weighted outputs of experts.
#include "lanes.hpp"

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

// Vectors whose sums are held in registers while all summands pass.
constexpr std::size_t BLOCK = 4;

// body(at, lanes of each vector, number of vectors) over n numbers: blocks, then single vectors, the last one short.
template <class Body> WASTE_INLINE void blocks(std::size_t n, const Body &body) {
  std::size_t at = 0;
  for (; at + BLOCK * FLOATS <= n; at += BLOCK * FLOATS) {
    body.template operator()<BLOCK>(at, FLOATS);
  }
  for (; at + FLOATS <= n; at += FLOATS) {
    body.template operator()<1>(at, FLOATS);
  }
  if (at < n) {
    body.template operator()<1>(at, n - at);
  }
}

void mean(const float *x, std::size_t stride, std::size_t count, std::size_t n, float *out) {
  const float share = 1.0f / static_cast<float>(count);
  blocks(n, [=]<std::size_t VECTORS>(std::size_t at, std::size_t lanes) __attribute__((always_inline)) {
    Floats total[VECTORS];
    for (std::size_t v = 0; v < VECTORS; ++v) {
      total[v] = some(x + at + v * FLOATS, lanes);
    }
    for (std::size_t k = 1; k < count; ++k) {
      for (std::size_t v = 0; v < VECTORS; ++v) {
        total[v] += some(x + k * stride + at + v * FLOATS, lanes);
      }
    }
    for (std::size_t v = 0; v < VECTORS; ++v) {
      store_some(out + at + v * FLOATS, total[v] * share, lanes);
    }
  });
}

void weighted(const float *x, std::size_t stride, const float *weight, std::size_t count, const float *more,
              std::size_t n, float *out) {
  blocks(n, [=]<std::size_t VECTORS>(std::size_t at, std::size_t lanes) __attribute__((always_inline)) {
    Floats total[VECTORS]{};
    for (std::size_t k = 0; k < count; ++k) {
      for (std::size_t v = 0; v < VECTORS; ++v) {
        total[v] += weight[k] * some(x + k * stride + at + v * FLOATS, lanes);
      }
    }
    for (std::size_t v = 0; v < VECTORS; ++v) {
      if (more != nullptr) {
        total[v] += some(more + at + v * FLOATS, lanes);
      }
      store_some(out + at + v * FLOATS, total[v], lanes);
    }
  });
}

// N: the number of streams where it is known, else 0.
template <std::size_t N>
WASTE_INLINE void mix_streams(float *x, std::size_t stride, const float *post, const float *comb, std::size_t given,
                              const float *out, std::size_t n) {
  const std::size_t count = N > 0 ? N : given;
  each(n, [=](std::size_t at, std::size_t lanes) __attribute__((always_inline)) {
    Floats old[N > 0 ? N : HC_STREAMS];
    for (std::size_t k = 0; k < count; ++k) {
      old[k] = some(x + k * stride + at, lanes);
    }
    const Floats added = some(out + at, lanes);
    for (std::size_t i = 0; i < count; ++i) {
      Floats next = post[i] * added;
      for (std::size_t k = 0; k < count; ++k) {
        next += comb[k * count + i] * old[k];
      }
      store_some(x + i * stride + at, next, lanes);
    }
  });
}

void mix(float *x, std::size_t stride, const float *post, const float *comb, std::size_t count, const float *out,
         std::size_t n) {
  if (count == 4) { // GLM-5.3-Flash's: the old streams stay in registers
    return mix_streams<4>(x, stride, post, comb, count, out, n);
  }
  mix_streams<0>(x, stride, post, comb, count, out, n);
}

} // namespace

const StreamLanes STREAMS = {mean, weighted, mix};

} // namespace waste::WASTE_ISA
