// The way back from the coordinates of the rotated formats, unnormalised: Hadamard over 128 numbers, then sign flips.
//
// Additions alone: whole numbers of moderate size come out exact.
#pragma once

#include "simd.hpp"
#include "wt_tables.hpp"

namespace waste {

// 128 numbers, or vectors of them.
template <class T> WASTE_INLINE void rotate_back(T *x) {
  for (std::size_t half = 1; half < 128; half *= 2) {
    for (std::size_t begin = 0; begin < 128; begin += 2 * half) {
      for (std::size_t k = begin; k < begin + half; ++k) {
        const T a = x[k], b = x[k + half];
        x[k] = a + b;
        x[k + half] = a - b;
      }
    }
  }
  for (std::size_t k = 0; k < 128; ++k) {
    x[k] = SIGNS[k / 32] >> k % 32 & 1 ? -x[k] : x[k];
  }
}

} // namespace waste
