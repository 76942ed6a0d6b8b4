// Vectors that are one register each, whatever the instruction set: what loops are written in that must be fast on all.
//
// A vector type wider than a register works everywhere, but GCC keeps it in memory and copies it in pieces: products
// written so ran slower on AVX2 than on the baseline. Results that depend on lanes (sums over them) are defined for
// sixteen: so many registers side by side, PARTS of them.
#pragma once

#include "../simd.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace waste::WASTE_ISA {

#if defined(__AVX512F__)
using Floats = f32x16;
using Doubles = f64x8;
#elif defined(__AVX2__)
using Floats = f32x8;
using Doubles = f64x4;
#else
using Floats = f32x4;
using Doubles = f64x2;
#endif

constexpr std::size_t FLOATS = sizeof(Floats) / sizeof(float), DOUBLES = sizeof(Doubles) / sizeof(double);
constexpr std::size_t PARTS = LANES / FLOATS; // registers of sixteen floats
constexpr std::size_t WIDE_PARTS = LANES / DOUBLES;
constexpr bool MANY_REGISTERS = FLOATS == 16; // 32 of them, otherwise 16

WASTE_INLINE Floats floats(const float *from) { return load<Floats>(from); }

WASTE_INLINE Floats floats(const std::uint16_t *from) { // bf16
#if defined(__AVX512F__)
  return as<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#elif defined(__AVX2__)
  return as<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16));
#else
  using Pair = std::uint64_t __attribute__((vector_size(16)));
  const u16x8 four = as<u16x8>(Pair{load<std::uint64_t>(from), 0});
  return as<Floats>(__builtin_shufflevector(u16x8{}, four, 0, 8, 1, 9, 2, 10, 3, 11));
#endif
}

WASTE_INLINE Doubles doubles(const float *from) {
#if defined(__AVX512F__)
  return as<Doubles>(_mm512_cvtps_pd(load<__m256>(from)));
#elif defined(__AVX2__)
  return as<Doubles>(_mm256_cvtps_pd(load<__m128>(from)));
#else
  return Doubles{from[0], from[1]};
#endif
}

WASTE_INLINE Doubles doubles(const std::uint16_t *from) { // bf16
#if defined(__AVX512F__)
  return as<Doubles>(
      _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16))));
#elif defined(__AVX2__)
  const __m128i four = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
  return as<Doubles>(_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(four, 16))));
#else
  return Doubles{as<float>(static_cast<std::uint32_t>(from[0]) << 16),
                 as<float>(static_cast<std::uint32_t>(from[1]) << 16)};
#endif
}

// The end of a vector of `cols` numbers, from `whole` on, with zeros behind it.
template <class T> struct Rest {
  T of[LANES];

  WASTE_INLINE Rest(const T *from, std::size_t whole, std::size_t cols) : of{} {
    __builtin_memcpy(of, from + whole, (cols - whole) * sizeof(T));
  }
};

// Sum of the sixteen lanes of several registers, by the same tree as that of one.
template <class V, std::size_t COUNT> WASTE_INLINE auto sum(const V (&parts)[COUNT]) {
  if constexpr (COUNT == 1) {
    return waste::sum(parts[0]);
  } else {
    V half[COUNT / 2];
    for (std::size_t p = 0; p < COUNT / 2; ++p) {
      half[p] = parts[p] + parts[p + COUNT / 2];
    }
    return sum(half);
  }
}

// body(at, count) for registers of n numbers: count is FLOATS, known at compile time, but for the last.
template <class Body> WASTE_INLINE void each(std::size_t n, const Body &body) {
  std::size_t at = 0;
  for (; at + FLOATS <= n; at += FLOATS) {
    body(at, FLOATS);
  }
  if (at < n) {
    body(at, n - at);
  }
}

// The first `count` <= FLOATS floats, zeros behind them.
WASTE_INLINE Floats some(const float *from, std::size_t count) {
  if (count == FLOATS) {
    return load<Floats>(from);
  }
  Floats value{};
  __builtin_memcpy(&value, from, count * sizeof(float));
  return value;
}

WASTE_INLINE void store_some(float *to, Floats value, std::size_t count) {
  if (count == FLOATS) {
    return store(to, value);
  }
  __builtin_memcpy(to, &value, count * sizeof(float));
}

} // namespace waste::WASTE_ISA
