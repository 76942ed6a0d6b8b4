// The codes of the strip formats (layouts: weight.hpp) as columns of 16 rows, unscaled.
//
// Templates of an anonymous namespace: what is compiled for one instruction set stays in its file.
#pragma once

#include "../simd.hpp"
#include "../weight.hpp"
#include "../wt_tables.hpp"

namespace waste {

namespace {

// Column 4j + q of vector j, for q = 0..3, as floats: 16 rows each.
WASTE_INLINE void columns_q8(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  const i32x16 v = load<i32x16>(codes + j * VECTOR);
  column[0] = __builtin_convertvector((v << 24) >> 24, f32x16);
  column[1] = __builtin_convertvector((v << 16) >> 24, f32x16);
  column[2] = __builtin_convertvector((v << 8) >> 24, f32x16);
  column[3] = __builtin_convertvector(v >> 24, f32x16);
}

// Columns 4j + q: vector j / 2, low nibbles for even j and high ones for odd.
WASTE_INLINE void columns_q4(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  const i32x16 v = load<i32x16>(codes + j / 2 * VECTOR) >> static_cast<int>(j % 2 * 4);
  column[0] = __builtin_convertvector((v & 15) - 8, f32x16);
  column[1] = __builtin_convertvector(((v >> 8) & 15) - 8, f32x16);
  column[2] = __builtin_convertvector(((v >> 16) & 15) - 8, f32x16);
  column[3] = __builtin_convertvector(((v >> 24) & 15) - 8, f32x16);
}

// Columns 4j + q: block j / 4 of two vectors of low bits and one of high bits.
WASTE_INLINE void columns_q6(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  const std::uint8_t *block = codes + j / 4 * 3 * VECTOR;
  const int i = static_cast<int>(j % 4);
  const i32x16 low = load<i32x16>(block + j % 4 / 2 * VECTOR) >> i % 2 * 4;
  const i32x16 high = load<i32x16>(block + 2 * VECTOR) >> 2 * i;
  for (int q = 0; q < 4; ++q) {
    const i32x16 code = ((low >> 8 * q) & 15) | (((high >> 8 * q) & 3) << 4);
    column[q] = __builtin_convertvector(code - 32, f32x16);
  }
}

// The trellis formats, 64 windows at a time. A run is the whole codes that lie side by side in a byte: its bits, and
// how many codes that is.
constexpr std::size_t run_bits(Format format) { return format == Format::wt3 ? 6 : 8; }
constexpr std::size_t run_codes(Format format) { return run_bits(format) / code_bits(format); }

// Run t of the ring in the low bits of each byte.
template <Format FORMAT> WASTE_INLINE u32x16 trellis_run(const std::uint8_t *codes, std::size_t t) {
  if constexpr (FORMAT != Format::wt3) {
    return load<u32x16>(codes + t % (GROUP / 4 / run_codes(FORMAT)) * VECTOR);
  } else {
    const std::uint8_t *three = codes + t / 4 % 4 * 3 * VECTOR;
    if (t % 4 < 3) {
      return load<u32x16>(three + t % 4 * VECTOR);
    }
    constexpr std::uint32_t low = 0x03030303;
    return (load<u32x16>(three) >> 6 & low) | (load<u32x16>(three + VECTOR) >> 4 & low << 2) |
           (load<u32x16>(three + 2 * VECTOR) >> 2 & low << 4);
  }
}

// Each byte is a window; column[q] is what the table has for byte q of each lane.
template <Format FORMAT> WASTE_INLINE void look_up(u32x16 window, f32x16 *column) {
  std::uint8_t steps[VECTOR];
  __builtin_memcpy(steps, &window, sizeof steps);
#if defined(__SSSE3__) || defined(__ARM_NEON)
  u8x16 table[4], w[4];
  __builtin_memcpy(table, TABLE<FORMAT>.steps, sizeof table);
  __builtin_memcpy(w, steps, sizeof w);
  for (u8x16 &part : w) {
    const u8x16 low = (part & 16) != 0 ? pick(table[1], part) : pick(table[0], part);
    const u8x16 high = (part & 16) != 0 ? pick(table[3], part) : pick(table[2], part);
    part = (part & 32) != 0 ? high : low;
  }
  __builtin_memcpy(steps, w, sizeof steps);
#else // without a shuffle of bytes, look-ups one by one are the faster ones
  for (std::uint8_t &step : steps) {
    step = static_cast<std::uint8_t>(TABLE<FORMAT>.steps[step]);
  }
#endif
  columns_q8(steps, 0, column);
}

// Columns 4j + q: windows that begin with code j, from the run that holds it and the next.
template <Format FORMAT>
WASTE_INLINE void columns_trellis(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  constexpr std::size_t CODES = run_codes(FORMAT), BITS = run_bits(FORMAT);
  const std::size_t run = j / CODES, past = j % CODES * code_bits(FORMAT), left = BITS - past;
  const std::uint32_t here = (63u & ((1u << left) - 1)) * 0x01010101u, there = 63u * 0x01010101u - here;
  const u32x16 window = (trellis_run<FORMAT>(codes, run) >> static_cast<int>(past) & here) |
                        (trellis_run<FORMAT>(codes, run + 1) << static_cast<int>(left) & there);
  look_up<FORMAT>(window, column);
}

// Columns 4j to 4j + 3, unscaled.
template <Format FORMAT>
WASTE_INLINE void columns(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  if constexpr (FORMAT == Format::q8) {
    columns_q8(codes, j, column);
  } else if constexpr (FORMAT == Format::q6) {
    columns_q6(codes, j, column);
  } else if constexpr (trellis(FORMAT)) {
    columns_trellis<FORMAT>(codes, j, column);
  } else {
    columns_q4(codes, j, column);
  }
}

// All 128 columns of a group, unscaled.
template <Format FORMAT>
WASTE_INLINE void group_columns(const std::uint8_t *codes, f32x16 *column) {
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    columns<FORMAT>(codes, j, column + 4 * j);
  }
}

// The factor of a group's columns, for products of unnormalised rotations.
template <Format FORMAT> WASTE_INLINE f32x16 group_scale(const std::uint8_t *strip) {
  return rotated(FORMAT) ? halves(strip) * RESCALE : halves(strip);
}

} // namespace

} // namespace waste
