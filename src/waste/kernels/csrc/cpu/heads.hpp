// Heads of a query laid across lanes, as the loops of attention take them.
#pragma once

#include <cstddef>

namespace waste {

// q (heads, channels) times a factor, with heads in lanes: out (channels, wide), zeros behind the last head.
inline void heads_in_lanes(const float *q, std::size_t heads, std::size_t wide, std::size_t channels,
                                 float factor, float *out) {
  constexpr std::size_t across = 16; // a line of each head, and lines of `out` that stay in the first-level cache
  for (std::size_t first = 0; first < channels; first += across) {
    const std::size_t end = channels - first < across ? channels : first + across;
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t r = first; r < end; ++r) {
        out[r * wide + h] = q[h * channels + r] * factor;
      }
    }
    for (std::size_t r = first; r < end; ++r) {
      for (std::size_t h = heads; h < wide; ++h) {
        out[r * wide + h] = 0.0f;
      }
    }
  }
}

} // namespace waste
