// Stored weights as floats.
#include "lanes.hpp"

#include "../rotate.hpp"
#include "columns.hpp"
#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

void decode_bf16(const std::uint16_t *w, std::size_t n, float *out) {
  std::size_t i = 0;
  for (; i + FLOATS <= n; i += FLOATS) {
    store(out + i, floats(w + i));
  }
  if (i < n) {
    const Rest<std::uint16_t> rest(w, i, n);
    store_some(out + i, floats(rest.of), n - i);
  }
}

template <Format FORMAT>
WASTE_INLINE void decode(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end, float *out) {
  constexpr std::size_t bytes = group_bytes(FORMAT);
  for (std::size_t first = 0; first < cols; first += GROUP, strip += bytes) {
    f32x16 column[GROUP];
    group_columns<FORMAT>(strip + SCALES, column);
    if constexpr (rotated(FORMAT)) {
      rotate_back(column);
    }
    const f32x16 scale = group_scale<FORMAT>(strip);
    float value[GROUP][STRIP];
    for (std::size_t k = 0; k < GROUP; ++k) {
      store(value[k], column[k] * scale);
    }
    const std::size_t left = cols - first, width = left < GROUP ? left : GROUP;
    for (std::size_t r = begin; r < end; ++r) {
      for (std::size_t k = 0; k < width; ++k) {
        out[(r - begin) * cols + first + k] = value[k][r];
      }
    }
  }
}

void decode_strip(Format format, const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                  float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { decode<FORMAT>(strip, cols, begin, end, out); });
}

} // namespace

const DecodeLanes DECODE = {decode_bf16, decode_strip};

} // namespace waste::WASTE_ISA
