// A matrix in one of the stored number formats, as the kernels see it: an address and four numbers.
//
// f32, bf16: row-major, no padding.
// q8, q4: strips of 16 rows; per strip, for each group of 128 columns in order, 16 half-precision scales (row
// order), then code vectors of 64 bytes; rows padded to 16 and columns to 128 with zero weights.
//   q8: 32 vectors; byte 4 * row + q of vector j is the int8 code of column 4j + q; weight = code * scale.
//   q4: 16 vectors; byte 4 * row + q of vector i holds column 8i + q (low nibble) and 8i + 4 + q (high nibble);
//       weight = (code - 8) * scale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace waste {

enum class Format : int { f32 = 0, bf16 = 1, q8 = 2, q4 = 3 };

constexpr std::size_t STRIP = 16;    // rows
constexpr std::size_t GROUP = 128;   // columns
constexpr std::size_t SCALES = 32;   // bytes of one group's scales
constexpr std::size_t VECTOR = 64;   // bytes

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

constexpr std::size_t group_bytes(Format format) { return SCALES + (format == Format::q8 ? 32 : 16) * VECTOR; }

struct Weight {
  const std::uint8_t *data;
  Format format;
  std::size_t rows;
  std::size_t cols;

  bool strips() const { return format == Format::q8 || format == Format::q4; }
  std::size_t groups() const { return ceil_div(cols, GROUP); }
  const std::uint8_t *strip(std::size_t i) const { return data + i * groups() * group_bytes(format); }
};

} // namespace waste
