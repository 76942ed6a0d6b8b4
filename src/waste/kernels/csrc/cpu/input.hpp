// Input vectors in 8 bits, for every instruction set: the compiler's vectors throughout, so all sets agree bit for bit.
#pragma once

#include "int8.hpp"
#include "rotate.hpp"

namespace waste {

// The lanes joined, pair by pair of halves. For whole numbers, whose order does not matter.
template <class Join, std::size_t... I>
WASTE_INLINE std::int32_t joined(i32x16 v, const Join &join, std::index_sequence<I...>) {
  v = join(v, __builtin_shufflevector(v, v, (I ^ 8)...));
  v = join(v, __builtin_shufflevector(v, v, (I ^ 4)...));
  v = join(v, __builtin_shufflevector(v, v, (I ^ 2)...));
  v = join(v, __builtin_shufflevector(v, v, (I ^ 1)...));
  return v[0];
}

// 128 inputs as codes. The largest magnitude gets code 127; rounding is to nearest, ties to even.
WASTE_INLINE void quantise_group(const float *x, float rescale, std::int8_t *codes, float *scale, std::int32_t *sum) {
  using i8x16 = std::int8_t __attribute__((vector_size(16)));
  constexpr std::size_t COUNT = GROUP / LANES;
  constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
  i32x16 top{};
  for (std::size_t i = 0; i < COUNT; ++i) {
    const i32x16 magnitude = load<i32x16>(x + i * LANES) & 0x7fffffff; // as whole numbers they keep their order
    top = magnitude > top ? magnitude : top;
  }
  constexpr std::make_index_sequence<LANES> lanes;
  const auto larger = [](i32x16 a, i32x16 b) __attribute__((always_inline)) { return a > b ? a : b; };
  const std::int32_t most = joined(top, larger, lanes);
  const float largest = std::bit_cast<float>(most);
  const bool finite = most < 0x7f800000, vanishing = largest < 1e-30f; // 127 / largest must not overflow
  const float inverse = finite && !vanishing ? 127.0f / largest : 0.0f;
  *scale = !finite ? __builtin_nanf("") : vanishing ? 0.0f : largest / 127.0f * rescale;
  i32x16 total{};
  for (std::size_t i = 0; i < COUNT; ++i) {
    const f32x16 v = finite ? load<f32x16>(x + i * LANES) : f32x16{};
    const i32x16 code = std::bit_cast<i32x16>(v * inverse + ROUND) - std::bit_cast<i32x16>(all(ROUND));
    store(codes + i * LANES, __builtin_convertvector(code, i8x16));
    total += code;
  }
  *sum = joined(total, [](i32x16 a, i32x16 b) __attribute__((always_inline)) { return a + b; }, lanes);
}

WASTE_INLINE void quantise_vector(const float *x, std::size_t cols, bool rotated, const Int8Vector &out) {
  for (std::size_t g = 0, at = 0; at < cols; ++g, at += GROUP) {
    float part[GROUP];
    const float *from = x + at;
    if (cols - at < GROUP) {
      __builtin_memset(part, 0, sizeof part);
      __builtin_memcpy(part, from, (cols - at) * sizeof(float));
      from = part;
    }
    if (rotated) {
      rotate(from, part);
      from = part;
    }
    quantise_group(from, rotated ? RESCALE : 1.0f, out.codes + at, out.scales + g, out.sums + g);
  }
}

} // namespace waste
