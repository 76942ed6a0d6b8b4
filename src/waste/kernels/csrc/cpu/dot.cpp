// Products of 16 weight rows with vectors, in float32 lanes, for every format; decoding of single rows.
//
// Row-major formats: lanes run along k, `sum` joins them at the end. Strip formats: lanes are the 16 rows; four
// accumulators (k mod 4) per group of 128, joined and scaled at the end of the group. One vector or many, the order is
// the same, so a token gets the same bits alone and in a batch.
#include "dot.hpp"

#include "rotate.hpp"
#include "simd.hpp"
#include "wt_tables.hpp"

namespace waste {

namespace {

// ---- row-major

template <std::size_t ROWS, std::size_t VECTORS, class T>
WASTE_INLINE void rows_tile(const T *w, std::size_t cols, const float *const *x, float *const *y, std::size_t at) {
  f32x16 acc[ROWS][VECTORS]{};
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t k = 0; k < whole; k += LANES) {
    f32x16 v[VECTORS];
    for (std::size_t t = 0; t < VECTORS; ++t) {
      v[t] = load<f32x16>(x[t] + k);
    }
    for (std::size_t r = 0; r < ROWS; ++r) {
      const f32x16 row = weights(w + r * cols + k);
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[r][t] += row * v[t];
      }
    }
  }
  if (whole < cols) {
    for (std::size_t r = 0; r < ROWS; ++r) {
      T part[LANES] = {};
      std::memcpy(part, w + r * cols + whole, (cols - whole) * sizeof(T));
      const f32x16 row = weights(part);
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[r][t] += row * load_part(x[t] + whole, cols - whole);
      }
    }
  }
  for (std::size_t r = 0; r < ROWS; ++r) {
    for (std::size_t t = 0; t < VECTORS; ++t) {
      y[t][at + r] = sum(acc[r][t]);
    }
  }
}

template <std::size_t VECTORS, class T>
WASTE_INLINE void rows_tokens(const T *w, std::size_t cols, std::size_t rows, const float *const *x, float *const *y,
                              std::size_t at) {
  std::size_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    rows_tile<4, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
  for (; r < rows; ++r) {
    rows_tile<1, VECTORS>(w + r * cols, cols, x, y, at + r);
  }
}

template <class T>
WASTE_INLINE void rows(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                       float *const *y, std::size_t at) {
  std::size_t t = 0;
  for (; t + 2 <= tokens; t += 2) {
    rows_tokens<2>(w, cols, count, x + t, y + t, at);
  }
  if (t < tokens) {
    rows_tokens<1>(w, cols, count, x + t, y + t, at);
  }
}

template <class T>
WASTE_INLINE void rows_f64(const T *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                           double *const *y, std::size_t at) {
  const std::size_t whole = cols / LANES * LANES;
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t r = 0; r < count; ++r) {
      const T *row = w + r * cols;
      f64x8 low{}, high{};
      for (std::size_t k = 0; k < whole; k += LANES) {
        low += widen(row + k) * widen(x[t] + k);
        high += widen(row + k + 8) * widen(x[t] + k + 8);
      }
      if (whole < cols) {
        T part[LANES] = {};
        float v[LANES] = {};
        std::memcpy(part, row + whole, (cols - whole) * sizeof(T));
        std::memcpy(v, x[t] + whole, (cols - whole) * sizeof(float));
        low += widen(part) * widen(v);
        high += widen(part + 8) * widen(v + 8);
      }
      y[t][at + r] = sum(low + high);
    }
  }
}

// ---- strips

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

template <Format FORMAT>
constexpr const WtTable &TABLE = FORMAT == Format::wt2 ? WT2 : FORMAT == Format::wt3 ? WT3 : WT4;

struct Steps {
  float of[64];
};

constexpr Steps floats(const WtTable &table) {
  Steps found{};
  for (int w = 0; w < 64; ++w) {
    found.of[w] = static_cast<float>(table.steps[w]);
  }
  return found;
}

template <Format FORMAT> constexpr Steps STEPS = floats(TABLE<FORMAT>);

// Byte q of each lane is a window; column[q] is what the table has for it. Here with the table as floats: 6
// instructions of AVX-512 a column, but hundreds of any other set.
template <Format FORMAT> WASTE_INLINE void look_wide(u32x16 window, f32x16 *column) {
  f32x16 table[4];
  std::memcpy(table, STEPS<FORMAT>.of, sizeof table);
  for (int q = 0; q < 4; ++q) {
    const i32x16 w = std::bit_cast<i32x16>(window >> 8 * q);
    column[q] = (w & 32) != 0 ? pick(table[2], table[3], w) : pick(table[0], table[1], w);
  }
}

// The same with the table as bytes: some 16 instructions a column, of any set since SSSE3.
template <Format FORMAT> WASTE_INLINE void look_narrow(u32x16 window, f32x16 *column) {
  u8x16 table[4], w[4];
  std::memcpy(table, TABLE<FORMAT>.steps, sizeof table);
  std::memcpy(w, &window, sizeof w);
  for (u8x16 &part : w) {
    const u8x16 low = (part & 16) != 0 ? pick(table[1], part) : pick(table[0], part);
    const u8x16 high = (part & 16) != 0 ? pick(table[3], part) : pick(table[2], part);
    part = (part & 32) != 0 ? high : low;
  }
  std::uint8_t steps[VECTOR];
  std::memcpy(steps, w, sizeof steps);
  columns_q8(steps, 0, column);
}

// Columns 4j + q: windows that begin with code j, from the run that holds it and the next.
template <Format FORMAT, bool WIDE>
WASTE_INLINE void columns_trellis(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  constexpr std::size_t CODES = run_codes(FORMAT), BITS = run_bits(FORMAT);
  const std::size_t run = j / CODES, past = j % CODES * code_bits(FORMAT), left = BITS - past;
  const std::uint32_t here = (63u & ((1u << left) - 1)) * 0x01010101u, there = 63u * 0x01010101u - here;
  const u32x16 window = (trellis_run<FORMAT>(codes, run) >> static_cast<int>(past) & here) |
                        (trellis_run<FORMAT>(codes, run + 1) << static_cast<int>(left) & there);
  if constexpr (WIDE) {
    look_wide<FORMAT>(window, column);
  } else {
    look_narrow<FORMAT>(window, column);
  }
}

// Columns 4j to 4j + 3, unscaled.
template <Format FORMAT, bool WIDE>
WASTE_INLINE void columns(const std::uint8_t *codes, std::size_t j, f32x16 *column) {
  if constexpr (FORMAT == Format::q8) {
    columns_q8(codes, j, column);
  } else if constexpr (FORMAT == Format::q6) {
    columns_q6(codes, j, column);
  } else if constexpr (trellis(FORMAT)) {
    columns_trellis<FORMAT, WIDE>(codes, j, column);
  } else {
    columns_q4(codes, j, column);
  }
}

// All 128 columns of a group, unscaled.
template <Format FORMAT, bool WIDE = false>
WASTE_INLINE void group_columns(const std::uint8_t *codes, f32x16 *column) {
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    columns<FORMAT, WIDE>(codes, j, column + 4 * j);
  }
}

// The factor of a group's columns, for products of unnormalised rotations.
template <Format FORMAT> WASTE_INLINE f32x16 group_scale(const std::uint8_t *strip) {
  return rotated(FORMAT) ? halves(strip) * RESCALE : halves(strip);
}

// 128 inputs of group g: in place, but in the buffer when columns are missing, which are zero.
template <Format FORMAT>
WASTE_INLINE const float *inputs(const float *x, std::size_t g, std::size_t cols, float *buffer) {
  const std::size_t left = cols - g * GROUP;
  if (rotated(FORMAT) || left >= GROUP) { // rotated ones are whole
    return x + g * GROUP;
  }
  std::memset(buffer, 0, GROUP * sizeof(float));
  std::memcpy(buffer, x + g * GROUP, left * sizeof(float));
  return buffer;
}

template <std::size_t VECTORS>
WASTE_INLINE void strip_group(const f32x16 *column, const float *const *v, f32x16 scale, f32x16 *total) {
  f32x16 acc[VECTORS][4]{};
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    for (std::size_t q = 0; q < 4; ++q) {
      for (std::size_t t = 0; t < VECTORS; ++t) {
        acc[t][q] += column[4 * j + q] * v[t][4 * j + q];
      }
    }
  }
  for (std::size_t t = 0; t < VECTORS; ++t) {
    total[t] += ((acc[t][0] + acc[t][1]) + (acc[t][2] + acc[t][3])) * scale;
  }
}

template <Format FORMAT, bool WIDE>
WASTE_INLINE f32x16 strip_one(const std::uint8_t *strip, std::size_t cols, const float *x) {
  f32x16 total{};
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    float buffer[GROUP];
    const float *v = inputs<FORMAT>(x, g, cols, buffer);
    f32x16 acc[4]{};
    // Eight unrolled together: where a column lies in its code vectors is then known at compile time, in every format.
    for (std::size_t eight = 0; eight < GROUP / 4; eight += 8) {
#pragma GCC unroll 8
      for (std::size_t j = eight; j < eight + 8; ++j) {
        f32x16 column[4];
        columns<FORMAT, WIDE>(strip + SCALES, j, column);
        for (std::size_t q = 0; q < 4; ++q) {
          acc[q] += column[q] * v[4 * j + q];
        }
      }
    }
    total += ((acc[0] + acc[1]) + (acc[2] + acc[3])) * group_scale<FORMAT>(strip);
    strip += group_bytes(FORMAT);
  }
  return total;
}

// Many vectors: each group is decoded once for all of them.
template <Format FORMAT, bool WIDE>
WASTE_INLINE void strip_many(const std::uint8_t *strip, std::size_t cols, const float *const *x, std::size_t tokens,
                             f32x16 *total) {
  for (std::size_t t = 0; t < tokens; ++t) {
    total[t] = f32x16{};
  }
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    f32x16 column[GROUP];
    group_columns<FORMAT, WIDE>(strip + SCALES, column);
    const f32x16 scale = group_scale<FORMAT>(strip);
    float buffer[2][GROUP];
    std::size_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      const float *v[2] = {inputs<FORMAT>(x[t], g, cols, buffer[0]), inputs<FORMAT>(x[t + 1], g, cols, buffer[1])};
      strip_group<2>(column, v, scale, total + t);
    }
    if (t < tokens) {
      const float *v[1] = {inputs<FORMAT>(x[t], g, cols, buffer[0])};
      strip_group<1>(column, v, scale, total + t);
    }
    strip += group_bytes(FORMAT);
  }
}

template <Format FORMAT, bool WIDE = false>
WASTE_INLINE void strip_rows(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                             const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  if (tokens == 1) {
    float lane[STRIP];
    store(lane, strip_one<FORMAT, WIDE>(strip, cols, x[0]));
    std::memcpy(y[0] + at, lane + begin, (end - begin) * sizeof(float));
    return;
  }
  f32x16 total[TOKENS];
  strip_many<FORMAT, WIDE>(strip, cols, x, tokens, total);
  for (std::size_t t = 0; t < tokens; ++t) {
    float lane[STRIP];
    store(lane, total[t]);
    std::memcpy(y[t] + at, lane + begin, (end - begin) * sizeof(float));
  }
}

template <Format FORMAT>
WASTE_INLINE void strip_f64(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                            const float *const *x, std::size_t tokens, double *const *y, std::size_t at) {
  double total[TOKENS][STRIP] = {};
  for (std::size_t g = 0; g * GROUP < cols; ++g) {
    float scale[STRIP], column[GROUP][STRIP];
    f32x16 decoded[GROUP];
    store(scale, group_scale<FORMAT>(strip));
    group_columns<FORMAT>(strip + SCALES, decoded);
    std::memcpy(column, decoded, sizeof column);
    const std::size_t left = cols - g * GROUP, count = left < GROUP ? left : GROUP;
    for (std::size_t t = 0; t < tokens; ++t) {
      double v[GROUP] = {};
      for (std::size_t k = 0; k < count; ++k) {
        v[k] = x[t][g * GROUP + k];
      }
      if constexpr (rotated(FORMAT)) {
        rotate(v);
      }
      double acc[STRIP] = {};
      for (std::size_t k = 0; k < GROUP; ++k) {
        for (std::size_t r = 0; r < STRIP; ++r) {
          acc[r] += static_cast<double>(column[k][r]) * v[k];
        }
      }
      for (std::size_t r = 0; r < STRIP; ++r) {
        total[t][r] += acc[r] * scale[r];
      }
    }
    strip += group_bytes(FORMAT);
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    std::memcpy(y[t] + at, total[t] + begin, (end - begin) * sizeof(double));
  }
}

} // namespace

// ---- one function per format, so that each can have its clones

WASTE_CLONES void dot_f32(const float *w, std::size_t cols, std::size_t count, const float *const *x,
                          std::size_t tokens, float *const *y, std::size_t at) {
  rows(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_bf16(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x,
                           std::size_t tokens, float *const *y, std::size_t at) {
  rows(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_f32_f64(const float *w, std::size_t cols, std::size_t count, const float *const *x,
                              std::size_t tokens, double *const *y, std::size_t at) {
  rows_f64(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_bf16_f64(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x,
                               std::size_t tokens, double *const *y, std::size_t at) {
  rows_f64(w, cols, count, x, tokens, y, at);
}

WASTE_CLONES void dot_q8(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                         const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  strip_rows<Format::q8>(strip, cols, begin, end, x, tokens, y, at);
}

WASTE_CLONES void dot_q4(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                         const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  strip_rows<Format::q4>(strip, cols, begin, end, x, tokens, y, at);
}

WASTE_VERSIONS(void dot_wt2(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                            const float *const *x, std::size_t tokens, float *const *y, std::size_t at),
               strip_rows<Format::wt2, WIDE>(strip, cols, begin, end, x, tokens, y, at))

WASTE_VERSIONS(void dot_wt3(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                            const float *const *x, std::size_t tokens, float *const *y, std::size_t at),
               strip_rows<Format::wt3, WIDE>(strip, cols, begin, end, x, tokens, y, at))

WASTE_VERSIONS(void dot_wt4(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                            const float *const *x, std::size_t tokens, float *const *y, std::size_t at),
               strip_rows<Format::wt4, WIDE>(strip, cols, begin, end, x, tokens, y, at))

WASTE_CLONES void dot_q6(const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                         const float *const *x, std::size_t tokens, float *const *y, std::size_t at) {
  strip_rows<Format::q6>(strip, cols, begin, end, x, tokens, y, at);
}

// One group as 128 columns of 16 rows, rotated back and scaled.
template <Format FORMAT> WASTE_INLINE void decoded_group(const std::uint8_t *strip, f32x16 *column) {
  group_columns<FORMAT>(strip + SCALES, column);
  rotate_back(column);
  const f32x16 scale = group_scale<FORMAT>(strip);
  for (std::size_t k = 0; k < GROUP; ++k) {
    column[k] *= scale;
  }
}

WASTE_CLONES void decode_wt2(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt2>(strip, column); }
WASTE_CLONES void decode_wt3(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt3>(strip, column); }
WASTE_CLONES void decode_wt4(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::wt4>(strip, column); }
WASTE_CLONES void decode_q6(const std::uint8_t *strip, f32x16 *column) { decoded_group<Format::q6>(strip, column); }

WASTE_CLONES void rotate_input(const float *x, std::size_t cols, float *out) {
  const std::size_t padded = ceil_div(cols, GROUP) * GROUP;
  std::memcpy(out, x, cols * sizeof(float));
  std::memset(out + cols, 0, (padded - cols) * sizeof(float));
  for (std::size_t k = 0; k < padded; k += GROUP) {
    rotate(out + k);
  }
}

void dot_block(const Weight &w, std::size_t block, std::size_t begin, std::size_t end, const float *const *x,
               std::size_t tokens, float *const *y, std::size_t first) {
  const std::size_t at = begin - first, base = block * STRIP;
  switch (w.format) {
  case Format::f32:
    return dot_f32(reinterpret_cast<const float *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y, at);
  case Format::bf16:
    return dot_bf16(reinterpret_cast<const std::uint16_t *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens,
                    y, at);
  case Format::q8:
    return dot_q8(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::q4:
    return dot_q4(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt2:
    return dot_wt2(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt3:
    return dot_wt3(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt4:
    return dot_wt4(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::q6:
    return dot_q6(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  }
}

void dot_block_f64(const Weight &w, std::size_t block, std::size_t begin, std::size_t end, const float *const *x,
                   std::size_t tokens, double *const *y, std::size_t first) {
  const std::size_t at = begin - first, base = block * STRIP;
  switch (w.format) {
  case Format::f32:
    return dot_f32_f64(reinterpret_cast<const float *>(w.data) + begin * w.cols, w.cols, end - begin, x, tokens, y,
                       at);
  case Format::bf16:
    return dot_bf16_f64(reinterpret_cast<const std::uint16_t *>(w.data) + begin * w.cols, w.cols, end - begin, x,
                        tokens, y, at);
  case Format::q8:
    return strip_f64<Format::q8>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::q4:
    return strip_f64<Format::q4>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt2:
    return strip_f64<Format::wt2>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt3:
    return strip_f64<Format::wt3>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::wt4:
    return strip_f64<Format::wt4>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  case Format::q6:
    return strip_f64<Format::q6>(w.strip(block), w.cols, begin - base, end - base, x, tokens, y, at);
  }
}

namespace {

// Rows `lane` to `lane` + `count` - 1 of a strip of a rotated matrix, one behind the other.
void decode_rotated(const Weight &w, std::size_t block, std::size_t lane, std::size_t count, float *out) {
  const std::uint8_t *strip = w.strip(block);
  for (std::size_t g = 0; g < w.groups(); ++g, strip += group_bytes(w.format)) {
    f32x16 column[GROUP];
    switch (w.format) {
    case Format::wt2:
      decode_wt2(strip, column);
      break;
    case Format::wt3:
      decode_wt3(strip, column);
      break;
    case Format::wt4:
      decode_wt4(strip, column);
      break;
    default:
      decode_q6(strip, column);
    }
    float value[GROUP][STRIP];
    std::memcpy(value, column, sizeof value);
    const std::size_t left = w.cols - g * GROUP, width = left < GROUP ? left : GROUP;
    for (std::size_t r = 0; r < count; ++r) {
      for (std::size_t k = 0; k < width; ++k) {
        out[r * w.cols + g * GROUP + k] = value[k][lane + r];
      }
    }
  }
}

} // namespace

void decode_block(const Weight &w, std::size_t block, float *out) {
  const std::size_t begin = block * STRIP, left = w.rows - begin, count = left < STRIP ? left : STRIP;
  if (rotated(w.format)) {
    return decode_rotated(w, block, 0, count, out);
  }
  for (std::size_t r = 0; r < count; ++r) {
    decode_row(w, begin + r, out + r * w.cols);
  }
}

void decode_row(const Weight &w, std::size_t row, float *out) {
  switch (w.format) {
  case Format::f32:
    std::memcpy(out, w.data + row * w.cols * sizeof(float), w.cols * sizeof(float));
    return;
  case Format::bf16:
    for (std::size_t k = 0; k < w.cols; ++k) {
      std::uint16_t bits;
      std::memcpy(&bits, w.data + (row * w.cols + k) * sizeof bits, sizeof bits);
      out[k] = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }
    return;
  case Format::wt2:
  case Format::wt3:
  case Format::wt4:
  case Format::q6:
    return decode_rotated(w, row / STRIP, row % STRIP, 1, out);
  case Format::q8:
  case Format::q4:
    break;
  }
  const std::size_t lane = row % STRIP;
  const std::uint8_t *group = w.strip(row / STRIP);
  for (std::size_t g = 0; g < w.groups(); ++g, group += group_bytes(w.format)) {
    float scale[STRIP];
    store(scale, halves(group));
    const std::size_t left = w.cols - g * GROUP, count = left < GROUP ? left : GROUP;
    for (std::size_t k = 0; k < count; ++k) {
      int code;
      if (w.format == Format::q8) {
        code = static_cast<std::int8_t>(group[SCALES + k / 4 * VECTOR + 4 * lane + k % 4]);
      } else {
        const int byte = group[SCALES + k / 8 * VECTOR + 4 * lane + k % 4];
        code = (k % 8 < 4 ? byte & 15 : byte >> 4) - 8;
      }
      out[g * GROUP + k] = static_cast<float>(code) * scale[lane];
    }
  }
}

} // namespace waste
