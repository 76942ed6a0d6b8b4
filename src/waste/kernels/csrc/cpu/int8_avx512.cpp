// Products with inputs of 8 bits for AVX-512 VNNI and VBMI without AMX.
#include "int8_avx512.hpp"

namespace {

constexpr std::size_t TILE = 8; // vectors at once: 8 sums, one decoded vector and the input in 10 of 32 registers

template <Format FORMAT, std::size_t COUNT>
WASTE_INLINE void tile(const V *weights, __m512 scales, std::size_t g, const Int8Vector *x, float *out) {
  V sum[COUNT];
  for (std::size_t i = 0; i < COUNT; ++i) {
    sum[i] = _mm512_set1_epi32(-OFFSET<FORMAT> * x[i].sums[g]);
  }
#pragma GCC unroll 4
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    for (std::size_t i = 0; i < COUNT; ++i) {
      sum[i] = _mm512_dpbusd_epi32(sum[i], weights[j], four(x[i].codes + g * GROUP + 4 * j));
    }
  }
  for (std::size_t i = 0; i < COUNT; ++i) {
    _mm512_storeu_ps(out + i * STRIP, accumulate(_mm512_loadu_ps(out + i * STRIP), sum[i], scales, x[i].scales[g]));
  }
}

template <Format FORMAT>
static void many_of(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, std::size_t tokens,
                    float *out) {
  const Tables t = tables<FORMAT, false>();
  __builtin_memset(out, 0, tokens * STRIP * sizeof(float));
  for (std::size_t g = 0; g < groups; ++g, strip += group_bytes(FORMAT)) {
    V weights[GROUP / 4];
    each_quad<FORMAT, false, true>(strip + SCALES, t,
                                   [&](std::size_t j, V v) __attribute__((always_inline)) { weights[j] = v; });
    const __m512 scales = scales_at(strip);
    std::size_t i = 0;
    for (; i + TILE <= tokens; i += TILE) {
      tile<FORMAT, TILE>(weights, scales, g, x + i, out + i * STRIP);
    }
    for (; i + 2 <= tokens; i += 2) {
      tile<FORMAT, 2>(weights, scales, g, x + i, out + i * STRIP);
    }
    if (i < tokens) {
      tile<FORMAT, 1>(weights, scales, g, x + i, out + i * STRIP);
    }
  }
}

static void many(Format format, const std::uint8_t *strip, std::size_t, std::size_t groups, const Int8Vector *x,
                 const void *, std::size_t tokens, float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { many_of<FORMAT>(strip, groups, x, tokens, out); });
}

} // namespace

const waste::Int8Kernels waste::INT8_AVX512 = {few, many, 1, nullptr, nullptr};
