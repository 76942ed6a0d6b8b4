// The rotation of the rotated formats, unnormalised: sign flips, then Hadamard over 128 numbers; and its way back.
//
// Additions alone: whole numbers of moderate size come out exact, so a one-hot input reads the very weights that
// decoding gives.
#pragma once

#include "simd.hpp"
#include "wt_tables.hpp"

#include <utility>

namespace waste {

constexpr WASTE_INLINE bool flipped(std::size_t k) { return SIGNS[k / 32] >> k % 32 & 1; }

// The flips as factors: bits tested one by one took more time than the transform.
struct Flips {
  float of[128];
};

constexpr Flips FLIPS = [] {
  Flips found{};
  for (std::size_t k = 0; k < 128; ++k) {
    found.of[k] = flipped(k) ? -1.0f : 1.0f;
  }
  return found;
}();

// One step of the transform inside a vector: pairs of lanes `HALF` apart.
template <std::size_t HALF, std::size_t... I> WASTE_INLINE f32x16 butterfly(f32x16 v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, (I ^ HALF)...) + v * f32x16{(I & HALF ? -1.0f : 1.0f)...};
}

// 128 numbers. `out` may be x.
WASTE_INLINE void rotate(const float *x, float *out) {
  constexpr std::size_t COUNT = 128 / LANES;
  constexpr std::make_index_sequence<LANES> lanes;
  f32x16 v[COUNT];
  for (std::size_t i = 0; i < COUNT; ++i) {
    v[i] = load<f32x16>(x + i * LANES) * load<f32x16>(FLIPS.of + i * LANES);
    v[i] = butterfly<1>(v[i], lanes);
    v[i] = butterfly<2>(v[i], lanes);
    v[i] = butterfly<4>(v[i], lanes);
    v[i] = butterfly<8>(v[i], lanes);
  }
  for (std::size_t half = 1; half < COUNT; half *= 2) {
    for (std::size_t begin = 0; begin < COUNT; begin += 2 * half) {
      for (std::size_t i = begin; i < begin + half; ++i) {
        const f32x16 a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
    }
  }
  for (std::size_t i = 0; i < COUNT; ++i) {
    store(out + i * LANES, v[i]);
  }
}

// Hadamard over 128 numbers, or vectors of them.
template <class T> WASTE_INLINE void hadamard(T *x) {
  for (std::size_t half = 1; half < 128; half *= 2) {
    for (std::size_t begin = 0; begin < 128; begin += 2 * half) {
      for (std::size_t k = begin; k < begin + half; ++k) {
        const T a = x[k], b = x[k + half];
        x[k] = a + b;
        x[k + half] = a - b;
      }
    }
  }
}

WASTE_INLINE void rotate_back(f32x16 *x) {
  hadamard(x);
  for (std::size_t k = 0; k < 128; ++k) {
    x[k] = flipped(k) ? -x[k] : x[k];
  }
}

} // namespace waste
