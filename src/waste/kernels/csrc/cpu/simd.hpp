// Sixteen lanes: the vector types the hot loops are written in, and the few functions on them.
//
// The compiler's own vector types lower to whatever the target has (one AVX-512 register, two AVX, four SSE or
// NEON), always with the same operations on the same lanes. With -ffp-contract=off every target therefore
// computes the same bits, which is what allows several clones of one function.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(std::endian::native == std::endian::little, "weights are stored little-endian");

#define WASTE_INLINE inline __attribute__((always_inline))

// Clones need ifunc (ELF) and GCC's resolver; elsewhere the one portable version is built. Versions are clones with a
// body of their own: LEVEL is that of x86-64 it is compiled for (3 has AVX2 and fused multiply-adds, 4 AVX-512), WIDE is
// true in the one for AVX-512.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WASTE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WASTE_VERSIONS(HEAD, ...)                                                                                      \
  __attribute__((target("arch=x86-64-v4"))) HEAD { WASTE_BODY(4, __VA_ARGS__) }                                        \
  __attribute__((target("arch=x86-64-v3"))) HEAD { WASTE_BODY(3, __VA_ARGS__) }                                        \
  __attribute__((target("arch=x86-64-v2"))) HEAD { WASTE_BODY(2, __VA_ARGS__) }                                        \
  __attribute__((target("default"))) HEAD { WASTE_BODY(1, __VA_ARGS__) }
#else
#define WASTE_CLONES
#define WASTE_VERSIONS(HEAD, ...)                                                                                      \
  HEAD { WASTE_BODY(1, __VA_ARGS__) }
#endif
#define WASTE_BODY(OF, ...)                                                                                            \
  [[maybe_unused]] constexpr int LEVEL = OF;                                                                           \
  [[maybe_unused]] constexpr bool WIDE = LEVEL >= 4;                                                                   \
  __VA_ARGS__;

namespace waste {

constexpr std::size_t LANES = 16;

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using u8x16 = std::uint8_t __attribute__((vector_size(16)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));
using u16x8 = std::uint16_t __attribute__((vector_size(16)));
using u32x8 = std::uint32_t __attribute__((vector_size(32)));
using f32x8 = float __attribute__((vector_size(32)));
using f64x8 = double __attribute__((vector_size(64)));

template <class V> WASTE_INLINE V load(const void *from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V> WASTE_INLINE void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }

WASTE_INLINE f32x16 all(float value) { return f32x16{} + value; }

// Look-ups, lane by lane: table[index % 16], and the two vectors of a table[index % 32].
#if defined(__clang__)
WASTE_INLINE u8x16 pick(u8x16 table, u8x16 index) { return __builtin_shufflevector(table, index & 15); }
WASTE_INLINE f32x16 pick(f32x16 low, f32x16 high, i32x16 index) {
  f32x16 found;
  for (std::size_t i = 0; i < LANES; ++i) {
    found[i] = index[i] & 16 ? high[index[i] & 15] : low[index[i] & 15];
  }
  return found;
}
#else
WASTE_INLINE u8x16 pick(u8x16 table, u8x16 index) { return __builtin_shuffle(table, index); }
WASTE_INLINE f32x16 pick(f32x16 low, f32x16 high, i32x16 index) { return __builtin_shuffle(low, high, index); }
#endif

// The first `count` <= 16 floats, zeros behind them.
WASTE_INLINE f32x16 load_part(const float *from, std::size_t count) {
  if (count == LANES) {
    return load<f32x16>(from);
  }
  f32x16 value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

WASTE_INLINE void store_part(float *to, f32x16 value, std::size_t count) {
  if (count == LANES) {
    return store(to, value);
  }
  std::memcpy(to, &value, count * sizeof(float));
}

// Sum of the lanes, always by the same tree.
WASTE_INLINE float sum(f32x16 value) {
  float lane[LANES];
  store(lane, value);
  for (std::size_t width = LANES / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      lane[i] += lane[i + width];
    }
  }
  return lane[0];
}

WASTE_INLINE double sum(f64x8 value) {
  double lane[8];
  store(lane, value);
  for (std::size_t width = 4; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      lane[i] += lane[i + width];
    }
  }
  return lane[0];
}

WASTE_INLINE f64x8 widen(const float *from) { return __builtin_convertvector(load<f32x8>(from), f64x8); }

// Sixteen weights of a row-major matrix as floats.
WASTE_INLINE f32x16 weights(const float *from) { return load<f32x16>(from); }

WASTE_INLINE f32x16 weights(const std::uint16_t *from) { // bf16
  const u32x16 bits = __builtin_convertvector(load<u16x16>(from), u32x16) << 16;
  return std::bit_cast<f32x16>(bits);
}

// Eight of them in float64.
WASTE_INLINE f64x8 widen(const std::uint16_t *from) {
  const u32x8 bits = __builtin_convertvector(load<u16x8>(from), u32x8) << 16;
  return __builtin_convertvector(std::bit_cast<f32x8>(bits), f64x8);
}

// Sixteen half-precision numbers as floats. Integer arithmetic: subnormal halves survive flush-to-zero.
WASTE_INLINE f32x16 halves(const void *from) {
  const i32x16 bits = __builtin_convertvector(load<u16x16>(from), i32x16);
  const i32x16 magnitude = bits & 0x7fff;
  const i32x16 finite = (magnitude << 13) + (112 << 23);
  const i32x16 special = (magnitude << 13) + (224 << 23);
  const i32x16 normal = magnitude >= 0x7c00 ? special : finite;
  const f32x16 tiny = __builtin_convertvector(magnitude, f32x16) * 0x1p-24f;
  const i32x16 value = magnitude < 0x400 ? std::bit_cast<i32x16>(tiny) : normal;
  return std::bit_cast<f32x16>(value | ((bits & 0x8000) << 16));
}

// e^x within 2 ulp: Cody-Waite reduction and a polynomial of degree 7 (Cephes expf). Flushes to zero below
// -87.3, where the result would be subnormal.
WASTE_INLINE f32x16 exp(f32x16 x) {
  constexpr float top = 88.722839f, bottom = -87.336544f, round = 12582912.0f; // 1.5 * 2^23
  f32x16 a = x > top ? all(top) : x;
  a = a < bottom ? all(bottom) : a;
  const f32x16 shifted = a * 1.44269504088896341f + round;
  const f32x16 n = shifted - round;
  const f32x16 r = (a - n * 0.693359375f) - n * -2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors, as n = 128 has no float.
  const i32x16 power = std::bit_cast<i32x16>(shifted) - std::bit_cast<i32x16>(all(round));
  const i32x16 half = power >> 1;
  p = p * std::bit_cast<f32x16>((half + 127) << 23) * std::bit_cast<f32x16>((power - half + 127) << 23);
  p = x > top ? all(__builtin_inff()) : p;
  return x < bottom ? f32x16{} : p;
}

WASTE_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

WASTE_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

} // namespace waste
