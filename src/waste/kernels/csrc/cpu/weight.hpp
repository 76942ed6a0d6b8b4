// A matrix in one of the stored number formats, as the kernels see it: an address and four numbers.
//
// f32, bf16: row-major, no padding.
// q8, q4: strips of 16 rows; per strip, for each group of 128 columns in order, 16 half-precision scales (row
// order), then code vectors of 64 bytes; rows padded to 16 and columns to 128 with zero weights.
//   q8: 32 vectors; byte 4 * row + q of vector j is the int8 code of column 4j + q; weight = code * scale.
//   q4: 16 vectors; byte 4 * row + q of vector i holds column 8i + q (low nibble) and 8i + 4 + q (high nibble);
//       weight = (code - 8) * scale.
// wt2, wt3, wt4, q6: the same strips, but of the matrix with every 128 columns rotated (SIGNS, then the orthonormal
// Hadamard transform) and with scales stored times SCALE_FACTOR (wt_tables.hpp). x . w = rotated x . rotated w.
//   wt2, wt3, wt4 (B = 2, 3, 4): 4 * B vectors; byte 4 * row + q of all of them together is one ring of 32 codes of B
//       bits, code m for column 4m + q; weight = scale * table[window], the window of column 4m + q being 6 bits: code
//       m the lowest, then m + 1 and so on, after 31 comes 0. Byte t holds (lowest bits first)
//       wt2: codes 4t to 4t + 3; wt4: codes 2t, 2t + 1;
//       wt3: of each three bytes the low 6 bits codes c0 c1 | c2 c3 | c4 c5, the high 2 bits together c6 c7.
//   q6: 8 times 3 vectors; two with low bits as q4 has them (columns 16j + 4i + q: i = 0, 1 in the nibbles of the
//       first, 2, 3 of the second), one with high bits (2i and 2i + 1 of byte 4 * row + q); weight = (code - 32) * scale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace waste {

enum class Format : int { f32 = 0, bf16 = 1, q8 = 2, q4 = 3, wt2 = 4, wt3 = 5, wt4 = 6, q6 = 7 };
constexpr int FORMATS = 8;

constexpr std::size_t STRIP = 16;    // rows
constexpr std::size_t GROUP = 128;   // columns
constexpr std::size_t SCALES = 32;   // bytes of one group's scales
constexpr std::size_t VECTOR = 64;   // bytes

constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Bits of a code of a strip format.
constexpr std::size_t code_bits(Format format) {
  switch (format) {
  case Format::wt2:
    return 2;
  case Format::wt3:
    return 3;
  case Format::q4:
  case Format::wt4:
    return 4;
  case Format::q6:
    return 6;
  default:
    return 8;
  }
}

constexpr std::size_t group_bytes(Format format) { return SCALES + STRIP * GROUP / 8 * code_bits(format); }

constexpr bool strips(Format format) { return format != Format::f32 && format != Format::bf16; }

constexpr bool trellis(Format format) {
  return format == Format::wt2 || format == Format::wt3 || format == Format::wt4;
}

constexpr bool rotated(Format format) { return trellis(format) || format == Format::q6; }

// call.operator()<FORMAT>() for the strip format given, nothing for row-major ones. Always inlined, as files compiled
// for one instruction set call it.
template <class Call> __attribute__((always_inline)) inline void with_strip_format(Format format, const Call &call) {
  switch (format) {
  case Format::wt2:
    return call.template operator()<Format::wt2>();
  case Format::wt3:
    return call.template operator()<Format::wt3>();
  case Format::wt4:
    return call.template operator()<Format::wt4>();
  case Format::q4:
    return call.template operator()<Format::q4>();
  case Format::q6:
    return call.template operator()<Format::q6>();
  case Format::q8:
    return call.template operator()<Format::q8>();
  case Format::f32:
  case Format::bf16: // row-major
    return;
  }
}

struct Weight {
  const std::uint8_t *data;
  Format format;
  std::size_t rows;
  std::size_t cols;

  std::size_t groups() const { return ceil_div(cols, GROUP); }
  const std::uint8_t *strip(std::size_t i) const { return data + i * groups() * group_bytes(format); }
};

} // namespace waste
