// Vector types of the compiler, and the few functions on them.
//
// They lower to whatever the target has (one AVX-512 register, two of AVX, four of SSE or NEON), always with the same
// operations on the same lanes. With -ffp-contract=off every instruction set therefore computes the same bits. Sixteen
// lanes are what results are defined for; loops that must be fast take them one register at a time (lanes/native.hpp).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

static_assert(std::endian::native == std::endian::little, "weights are stored little-endian");

#define WASTE_INLINE inline __attribute__((always_inline))

namespace waste {

constexpr std::size_t LANES = 16;

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using u8x16 = std::uint8_t __attribute__((vector_size(16)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));
using u16x8 = std::uint16_t __attribute__((vector_size(16)));
using f32x4 = float __attribute__((vector_size(16)));
using f32x8 = float __attribute__((vector_size(32)));
using f64x2 = double __attribute__((vector_size(16)));
using f64x4 = double __attribute__((vector_size(32)));
using f64x8 = double __attribute__((vector_size(64)));

// The same bits as another type. std::bit_cast would be a function of its own in builds that do not inline it.
template <class To, class From> WASTE_INLINE To as(From value) { return __builtin_bit_cast(To, value); }

template <class V> WASTE_INLINE V load(const void *from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class V> WASTE_INLINE void store(void *to, V value) { __builtin_memcpy(to, &value, sizeof value); }

// Look-ups, lane by lane: table[index % 16].
#if defined(__clang__)
WASTE_INLINE u8x16 pick(u8x16 table, u8x16 index) { return __builtin_shufflevector(table, index & 15); }
#else
WASTE_INLINE u8x16 pick(u8x16 table, u8x16 index) { return __builtin_shuffle(table, index); }
#endif

// Sum of the lanes, always by the same tree: the upper half is added to the lower one until one is left.
WASTE_INLINE float sum(f32x4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
WASTE_INLINE float sum(f32x8 v) {
  return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
}
WASTE_INLINE float sum(f32x16 v) {
  return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}
WASTE_INLINE double sum(f64x2 v) { return v[0] + v[1]; }
WASTE_INLINE double sum(f64x4 v) {
  return sum(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3));
}
WASTE_INLINE double sum(f64x8 v) {
  return sum(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
}

// Sixteen half-precision numbers as floats. Integer arithmetic: subnormal halves survive flush-to-zero.
WASTE_INLINE f32x16 halves(const void *from) {
  const i32x16 bits = __builtin_convertvector(load<u16x16>(from), i32x16);
  const i32x16 magnitude = bits & 0x7fff;
  const i32x16 finite = (magnitude << 13) + (112 << 23);
  const i32x16 special = (magnitude << 13) + (224 << 23);
  const i32x16 normal = magnitude >= 0x7c00 ? special : finite;
  const f32x16 tiny = __builtin_convertvector(magnitude, f32x16) * 0x1p-24f;
  const i32x16 value = magnitude < 0x400 ? as<i32x16>(tiny) : normal;
  return as<f32x16>(value | ((bits & 0x8000) << 16));
}

// e^x within 2 ulp, for vectors of floats of any width: Cody-Waite reduction and a polynomial of degree 7 (Cephes
// expf). Flushes to zero below -87.3, where the result would be subnormal.
template <class V> WASTE_INLINE V exp(V x) {
  using I = decltype(x > x);
  constexpr float top = 88.722839f, bottom = -87.336544f, round = 12582912.0f; // 1.5 * 2^23
  V a = x > top ? V{} + top : x;
  a = a < bottom ? V{} + bottom : a;
  const V shifted = a * 1.44269504088896341f + round;
  const V n = shifted - round;
  const V r = (a - n * 0.693359375f) - n * -2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors, as n = 128 has no float.
  const I power = as<I>(shifted) - as<I>(V{} + round);
  const I half = power >> 1;
  p = p * as<V>((half + 127) << 23) * as<V>((power - half + 127) << 23);
  p = x > top ? V{} + __builtin_inff() : p;
  return x < bottom ? V{} : p;
}

template <class V> WASTE_INLINE V sigmoid(V x) { return 1.0f / (1.0f + exp(-x)); }

template <class V> WASTE_INLINE V silu(V x) { return x / (1.0f + exp(-x)); }

} // namespace waste
