// Products with inputs of 8 bits on any processor: whole numbers in float lanes, which hold them exactly up to 2^24.
#include "int8.hpp"
#include "lanes/columns.hpp"

namespace {

using namespace waste;

// out (tokens, 16), each group decoded once.
template <Format FORMAT>
void strip_of(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, std::size_t tokens, float *out) {
  __builtin_memset(out, 0, tokens * STRIP * sizeof(float));
  for (std::size_t g = 0; g < groups; ++g, strip += group_bytes(FORMAT)) {
    f32x16 column[GROUP];
    group_columns<FORMAT>(strip + SCALES, column);
    const f32x16 scales = halves(strip);
    for (std::size_t i = 0; i < tokens; ++i) {
      const std::int8_t *codes = x[i].codes + g * GROUP;
      f32x16 sum[4]{};
      for (std::size_t k = 0; k < GROUP; k += 4) {
        for (std::size_t q = 0; q < 4; ++q) {
          sum[q] += column[k + q] * static_cast<float>(codes[k + q]);
        }
      }
      const f32x16 whole = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      store(out + i * STRIP, load<f32x16>(out + i * STRIP) + whole * (scales * x[i].scales[g]));
    }
  }
}

void strip_times(Format format, const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, std::size_t tokens,
                 float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { strip_of<FORMAT>(strip, groups, x, tokens, out); });
}

void few(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
         std::size_t tokens, float *out) {
  for (std::size_t s = 0; s < strips; ++s) {
    strip_times(format, strip + s * groups * group_bytes(format), groups, x, tokens, out + s * tokens * STRIP);
  }
}

void many(Format format, const std::uint8_t *strip, std::size_t, std::size_t groups, const Int8Vector *x,
                  const void *, std::size_t tokens, float *out) {
  strip_times(format, strip, groups, x, tokens, out);
}

} // namespace

const waste::Int8Kernels waste::INT8_PORTABLE = {few, many, 1, nullptr, nullptr};
