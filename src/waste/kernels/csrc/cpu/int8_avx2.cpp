// Products with inputs of 8 bits for AVX2: 8 rows of a strip at a time, so that everything stays in 16 registers.
#include "int8.hpp"
#include "simd.hpp"
#include "wt_tables.hpp"

#include <immintrin.h>

namespace {

using namespace waste;

using V = __m256i;

constexpr std::size_t HALF = 32;    // bytes of a code vector that belong to 8 rows
constexpr std::size_t AHEAD = 4096; // bytes that are asked for ahead of the codes being decoded

WASTE_INLINE V codes_at(const std::uint8_t *p) {
  _mm_prefetch(reinterpret_cast<const char *>(p) + AHEAD, _MM_HINT_T0);
  return _mm256_loadu_si256(reinterpret_cast<const V *>(p));
}

template <int BY> WASTE_INLINE V right(V v) { return _mm256_srli_epi16(v, BY); }
template <int BY> WASTE_INLINE V left(V v) { return _mm256_slli_epi16(v, BY); }

WASTE_INLINE V bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// Bit by bit: a where MASK has a one, else b.
template <unsigned char MASK> WASTE_INLINE V select(V a, V b) {
  return _mm256_or_si256(_mm256_and_si256(a, bytes(MASK)), _mm256_andnot_si256(bytes(MASK), b));
}

// What is added to a weight's code so that it is not negative; q8 stays signed here.
template <Format FORMAT> constexpr int OFFSET = FORMAT == Format::q8   ? 0
                                                : FORMAT == Format::q4 ? 8
                                                : FORMAT == Format::q6 ? 32
                                                                       : 64;

// A table of 64 bytes as four pieces of 16. pshufb gives 0 for an index with its top bit set, so with the index moved
// down by 16 for each piece, and every piece but the first xored with the one before it, the xor of the four look-ups
// is the entry: no blends.
struct Table {
  V piece[4];
};

WASTE_INLINE Table pieces(const std::uint8_t *table) {
  Table found;
  __m128i before = _mm_setzero_si128();
  for (int i = 0; i < 4; ++i) {
    const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16 * i));
    found.piece[i] = _mm256_broadcastsi128_si256(_mm_xor_si128(piece, before));
    before = piece;
  }
  return found;
}

WASTE_INLINE V look(const Table &t, V window) {
  const V w = _mm256_and_si256(window, bytes(63));
  const V a = _mm256_shuffle_epi8(t.piece[0], w);
  const V b = _mm256_shuffle_epi8(t.piece[1], _mm256_sub_epi8(w, bytes(16)));
  const V c = _mm256_shuffle_epi8(t.piece[2], _mm256_sub_epi8(w, bytes(32)));
  const V d = _mm256_shuffle_epi8(t.piece[3], _mm256_sub_epi8(w, bytes(48)));
  return _mm256_xor_si256(_mm256_xor_si256(a, c), _mm256_xor_si256(b, d));
}

// The table of a trellis format plus OFFSET. `swapped` has the two halves of its index exchanged: wt3's odd windows
// are joined from two bytes without a shift, high half first.
struct Tables {
  Table plain, swapped;
};

template <Format FORMAT> WASTE_INLINE Tables tables() {
  Tables found{};
  if constexpr (trellis(FORMAT)) {
    std::uint8_t plain[64], swapped[64];
    for (int w = 0; w < 64; ++w) {
      plain[w] = swapped[(w & 7) << 3 | w >> 3] = static_cast<std::uint8_t>(TABLE<FORMAT>.steps[w] + OFFSET<FORMAT>);
    }
    found.plain = pieces(plain);
    if (FORMAT == Format::wt3) {
      found.swapped = pieces(swapped);
    }
  }
  return found;
}

// take(j, bytes) for the 32 vectors of a group in order, 8 rows of them: byte 4 * row + q is the weight of column
// 4j + q plus OFFSET. `codes` begins at the rows wanted.
template <Format FORMAT, class Take>
WASTE_INLINE void each_quad(const std::uint8_t *codes, const Tables &t, const Take &take) {
  if constexpr (FORMAT == Format::wt3) {
    V v = codes_at(codes);
#pragma GCC unroll 1
    for (std::size_t b = 0; b < 4; ++b) {
      const std::uint8_t *p = codes + b * 3 * VECTOR;
      const V v1 = codes_at(p + VECTOR), v2 = codes_at(p + 2 * VECTOR);
      const V next = codes_at(b == 3 ? codes : p + 3 * VECTOR);
      const V spare = select<0x03>(right<6>(v), select<0x0C>(right<4>(v1), right<2>(v2)));
      take(8 * b, look(t.plain, v));
      take(8 * b + 1, look(t.swapped, select<0x38>(v, v1)));
      take(8 * b + 2, look(t.plain, v1));
      take(8 * b + 3, look(t.swapped, select<0x38>(v1, v2)));
      take(8 * b + 4, look(t.plain, v2));
      take(8 * b + 5, look(t.swapped, select<0x38>(v2, spare)));
      take(8 * b + 6, look(t.plain, spare));
      take(8 * b + 7, look(t.swapped, select<0x38>(spare, next)));
      v = next;
    }
  } else if constexpr (FORMAT == Format::wt2) {
    V v = codes_at(codes);
#pragma GCC unroll 1
    for (std::size_t b = 0; b < 8; ++b) {
      const V next = codes_at(b == 7 ? codes : codes + (b + 1) * VECTOR);
      const V both = select<0x0F>(right<4>(v), left<4>(next));
      take(4 * b, look(t.plain, v));
      take(4 * b + 1, look(t.plain, right<2>(v)));
      take(4 * b + 2, look(t.plain, both));
      take(4 * b + 3, look(t.plain, right<2>(both)));
      v = next;
    }
  } else if constexpr (FORMAT == Format::wt4) {
    V v = codes_at(codes);
#pragma GCC unroll 1
    for (std::size_t b = 0; b < 16; ++b) {
      const V next = codes_at(b == 15 ? codes : codes + (b + 1) * VECTOR);
      take(2 * b, look(t.plain, v));
      take(2 * b + 1, look(t.plain, select<0x0F>(right<4>(v), left<4>(next))));
      v = next;
    }
  } else if constexpr (FORMAT == Format::q4) {
#pragma GCC unroll 4
    for (std::size_t b = 0; b < 16; ++b) {
      const V v = codes_at(codes + b * VECTOR);
      take(2 * b, _mm256_and_si256(v, bytes(15)));
      take(2 * b + 1, _mm256_and_si256(right<4>(v), bytes(15)));
    }
  } else if constexpr (FORMAT == Format::q6) {
#pragma GCC unroll 2
    for (std::size_t b = 0; b < 8; ++b) {
      const std::uint8_t *p = codes + b * 3 * VECTOR;
      const V v0 = codes_at(p), v1 = codes_at(p + VECTOR), high = codes_at(p + 2 * VECTOR);
      take(4 * b, _mm256_and_si256(select<0x0F>(v0, left<4>(high)), bytes(63)));
      take(4 * b + 1, _mm256_and_si256(select<0x0F>(right<4>(v0), left<2>(high)), bytes(63)));
      take(4 * b + 2, _mm256_and_si256(select<0x0F>(v1, high), bytes(63)));
      take(4 * b + 3, _mm256_and_si256(select<0x0F>(right<4>(v1), right<2>(high)), bytes(63)));
    }
  } else {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < GROUP / 4; ++j) {
      take(j, codes_at(codes + j * VECTOR));
    }
  }
}

// sum += four products for each of 8 rows. Pairs stay below 2^15: weights are at most 127 where they have an offset.
// Signed weights give their sign to the inputs; a code of -128, which no encoder writes, still comes out right.
template <Format FORMAT> WASTE_INLINE V add_products(V sum, V weights, V input) {
  V pairs;
  if constexpr (OFFSET<FORMAT> == 0) {
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(input, weights));
  } else {
    pairs = _mm256_maddubs_epi16(weights, input);
  }
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

WASTE_INLINE V four(const std::int8_t *codes) {
  int quad;
  __builtin_memcpy(&quad, codes, sizeof quad);
  return _mm256_set1_epi32(quad);
}

WASTE_INLINE __m256 scales_at(const std::uint8_t *strip, std::size_t half) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(strip + half * 16)));
}

// total += sum * (scale of the weights * scale of the input)
WASTE_INLINE __m256 accumulate(__m256 total, V sum, __m256 scales, float scale) {
  return _mm256_add_ps(total, _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scales, _mm256_set1_ps(scale))));
}

template <Format FORMAT, std::size_t TOKENS>
static void few_of(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, float *out) {
  const Tables t = tables<FORMAT>();
  __m256 total[2][TOKENS];
  for (std::size_t i = 0; i < TOKENS; ++i) {
    total[0][i] = total[1][i] = _mm256_setzero_ps();
  }
  for (std::size_t g = 0; g < groups; ++g, strip += group_bytes(FORMAT)) {
    for (std::size_t half = 0; half < 2; ++half) {
      V sum[TOKENS];
      for (std::size_t i = 0; i < TOKENS; ++i) {
        sum[i] = _mm256_set1_epi32(-OFFSET<FORMAT> * x[i].sums[g]);
      }
      each_quad<FORMAT>(strip + SCALES + half * HALF, t, [&](std::size_t j, V weights) __attribute__((always_inline)) {
        for (std::size_t i = 0; i < TOKENS; ++i) {
          sum[i] = add_products<FORMAT>(sum[i], weights, four(x[i].codes + g * GROUP + 4 * j));
        }
      });
      const __m256 scales = scales_at(strip, half);
      for (std::size_t i = 0; i < TOKENS; ++i) {
        total[half][i] = accumulate(total[half][i], sum[i], scales, x[i].scales[g]);
      }
    }
  }
  for (std::size_t i = 0; i < TOKENS; ++i) {
    _mm256_storeu_ps(out + i * STRIP, total[0][i]);
    _mm256_storeu_ps(out + i * STRIP + 8, total[1][i]);
  }
}

template <Format FORMAT>
static void few_format(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, std::size_t tokens,
                       float *out) {
  switch (tokens) {
  case 1:
    return few_of<FORMAT, 1>(strip, groups, x, out);
  case 2:
    return few_of<FORMAT, 2>(strip, groups, x, out);
  case 3:
    return few_of<FORMAT, 3>(strip, groups, x, out);
  default:
    return few_of<FORMAT, 4>(strip, groups, x, out);
  }
}

constexpr std::size_t TILE = 4; // vectors at once

template <Format FORMAT, std::size_t COUNT>
WASTE_INLINE void tile(const V *weights, __m256 scales, std::size_t g, const Int8Vector *x, float *out) {
  V sum[COUNT];
  for (std::size_t i = 0; i < COUNT; ++i) {
    sum[i] = _mm256_set1_epi32(-OFFSET<FORMAT> * x[i].sums[g]);
  }
#pragma GCC unroll 2
  for (std::size_t j = 0; j < GROUP / 4; ++j) {
    for (std::size_t i = 0; i < COUNT; ++i) {
      sum[i] = add_products<FORMAT>(sum[i], weights[j], four(x[i].codes + g * GROUP + 4 * j));
    }
  }
  for (std::size_t i = 0; i < COUNT; ++i) {
    _mm256_storeu_ps(out + i * STRIP, accumulate(_mm256_loadu_ps(out + i * STRIP), sum[i], scales, x[i].scales[g]));
  }
}

template <Format FORMAT>
static void many_of(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, std::size_t tokens,
                    float *out) {
  const Tables t = tables<FORMAT>();
  __builtin_memset(out, 0, tokens * STRIP * sizeof(float));
  for (std::size_t g = 0; g < groups; ++g, strip += group_bytes(FORMAT)) {
    for (std::size_t half = 0; half < 2; ++half) {
      V weights[GROUP / 4];
      each_quad<FORMAT>(strip + SCALES + half * HALF, t,
                        [&](std::size_t j, V v) __attribute__((always_inline)) { weights[j] = v; });
      const __m256 scales = scales_at(strip, half);
      float *to = out + half * 8;
      std::size_t i = 0;
      for (; i + TILE <= tokens; i += TILE) {
        tile<FORMAT, TILE>(weights, scales, g, x + i, to + i * STRIP);
      }
      for (; i < tokens; ++i) {
        tile<FORMAT, 1>(weights, scales, g, x + i, to + i * STRIP);
      }
    }
  }
}

static void few_strip(Format format, const std::uint8_t *strip, std::size_t groups, const Int8Vector *x,
                      std::size_t tokens, float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { few_format<FORMAT>(strip, groups, x, tokens, out); });
}

static void few(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
                std::size_t tokens, float *out) {
  for (std::size_t s = 0; s < strips; ++s) {
    few_strip(format, strip + s * groups * group_bytes(format), groups, x, tokens, out + s * tokens * STRIP);
  }
}

static void many(Format format, const std::uint8_t *strip, std::size_t, std::size_t groups, const Int8Vector *x,
                 const void *, std::size_t tokens, float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { many_of<FORMAT>(strip, groups, x, tokens, out); });
}

} // namespace

const waste::Int8Kernels waste::INT8_AVX2 = {few, many, 1, nullptr, nullptr};
