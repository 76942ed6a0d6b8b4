// Strips decoded with AVX-512 VNNI, VBMI and GFNI, 64 weights an instruction: shared by the AVX-512 and the AMX code.
//
// Included only by files compiled for these sets. Everything has internal linkage: the linker must never take one of
// these functions for a processor that lacks the instructions.
#pragma once

#include "int8.hpp"
#include "simd.hpp"
#include "wt_tables.hpp"

#include <immintrin.h>

namespace {

using namespace waste;

using V = __m512i;

// Strips that are read side by side for one vector or a few: 1.1 to 1.2 times the speed from memory of one alone.
constexpr std::size_t STREAMS = 4;

// Bytes ahead of the codes being decoded that are asked for. With four streams 1.5 to 2 KB is best for all formats; 4
// KB lose 5 to 11 %, 8 KB 20.
constexpr std::size_t AHEAD = 2048;

template <bool FETCH> WASTE_INLINE V codes_at(const std::uint8_t *p) {
  if constexpr (FETCH) {
    _mm_prefetch(reinterpret_cast<const char *>(p) + AHEAD, _MM_HINT_T0);
  }
  return _mm512_loadu_si512(p);
}

template <int BY> WASTE_INLINE V right(V v) { return _mm512_srli_epi16(v, BY); }

// Bit by bit: a where MASK has a one, else b.
template <unsigned char MASK> WASTE_INLINE V select(V a, V b) {
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(static_cast<char>(MASK)), 0xE4);
}

// The bits of each byte moved by `FROM` places to the right (to the left below 0) and then MASK: any such move is one
// product with a matrix of bits, on either port, where shifts of words take two instructions and have one port.
template <int FROM, unsigned char MASK> WASTE_INLINE V moved(V v) {
  constexpr auto matrix = [] {
    unsigned long long rows = 0; // byte 7 - i: which bits make up bit i of the result
    for (int i = 0; i < 8; ++i) {
      if ((MASK >> i & 1) != 0 && i + FROM >= 0 && i + FROM < 8) {
        rows |= 1ull << (i + FROM) << 8 * (7 - i);
      }
    }
    return static_cast<long long>(rows);
  }();
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(matrix), 0);
}

// The high nibble of v below, the low nibble of `next` above.
WASTE_INLINE V joined_nibbles(V v, V next) {
  constexpr long long swap = 0x1020408001020408;
  return _mm512_gf2p8affine_epi64_epi8(select<0xF0>(v, next), _mm512_set1_epi64(swap), 0);
}

// What is added to a weight's code so that it is not negative.
template <Format FORMAT> constexpr int OFFSET = FORMAT == Format::q8   ? 128
                                                : FORMAT == Format::q4 ? 8
                                                : FORMAT == Format::q6 ? 32
                                                                       : 64;

// The table of a trellis format, plus OFFSET where that is asked for. `swapped` has the two halves of its index
// exchanged: wt3's odd windows are joined from two bytes without a shift, high half first.
struct Tables {
  V plain, swapped;
};

template <Format FORMAT, bool SIGNED> WASTE_INLINE Tables tables() {
  if constexpr (!trellis(FORMAT)) {
    return Tables{_mm512_setzero_si512(), _mm512_setzero_si512()};
  } else {
    const V steps = _mm512_loadu_si512(TABLE<FORMAT>.steps);
    const V plain = SIGNED ? steps : _mm512_add_epi8(steps, _mm512_set1_epi8(64));
    alignas(64) std::uint8_t order[64];
    for (int w = 0; w < 64; ++w) {
      order[w] = static_cast<std::uint8_t>((w & 7) << 3 | w >> 3);
    }
    return Tables{plain, _mm512_permutexvar_epi8(_mm512_load_si512(order), plain)};
  }
}

// take(j, bytes) for the 32 vectors of a group in order: byte 4 * row + q is the weight of column 4j + q, plus OFFSET
// unless SIGNED. vpermb ignores the two upper bits of an index, so windows may carry others' bits there. FETCH: asks
// for what lies AHEAD.
template <Format FORMAT, bool SIGNED, bool FETCH, class Take>
WASTE_INLINE void each_quad(const std::uint8_t *codes, const Tables &t, const Take &take) {
  const auto plain = [&](std::size_t j, V window) { take(j, _mm512_permutexvar_epi8(window, t.plain)); };
  const auto swapped = [&](std::size_t j, V window) { take(j, _mm512_permutexvar_epi8(window, t.swapped)); };
  if constexpr (FORMAT == Format::wt3) {
    V v = codes_at<FETCH>(codes);
#pragma GCC unroll 4
    for (std::size_t b = 0; b < 4; ++b) {
      const std::uint8_t *p = codes + b * 3 * VECTOR;
      const V v1 = codes_at<FETCH>(p + VECTOR), v2 = codes_at<FETCH>(p + 2 * VECTOR);
      const V next = b == 3 ? _mm512_loadu_si512(codes) : codes_at<FETCH>(p + 3 * VECTOR);
      const V spare = select<0x03>(right<6>(v), select<0x0C>(right<4>(v1), right<2>(v2)));
      plain(8 * b, v);
      swapped(8 * b + 1, select<0x38>(v, v1));
      plain(8 * b + 2, v1);
      swapped(8 * b + 3, select<0x38>(v1, v2));
      plain(8 * b + 4, v2);
      swapped(8 * b + 5, select<0x38>(v2, spare));
      plain(8 * b + 6, spare);
      swapped(8 * b + 7, select<0x38>(spare, next));
      v = next;
    }
  } else if constexpr (FORMAT == Format::wt2) {
    V v = codes_at<FETCH>(codes);
#pragma GCC unroll 8
    for (std::size_t b = 0; b < 8; ++b) {
      const V next = b == 7 ? _mm512_loadu_si512(codes) : codes_at<FETCH>(codes + (b + 1) * VECTOR);
      const V both = joined_nibbles(v, next);
      plain(4 * b, v);
      plain(4 * b + 1, right<2>(v));
      plain(4 * b + 2, both);
      plain(4 * b + 3, right<2>(both));
      v = next;
    }
  } else if constexpr (FORMAT == Format::wt4) {
    V v = codes_at<FETCH>(codes);
#pragma GCC unroll 16
    for (std::size_t b = 0; b < 16; ++b) {
      const V next = b == 15 ? _mm512_loadu_si512(codes) : codes_at<FETCH>(codes + (b + 1) * VECTOR);
      plain(2 * b, v);
      plain(2 * b + 1, joined_nibbles(v, next));
      v = next;
    }
  } else {
    const auto give = [&](std::size_t j, V code) {
      take(j, SIGNED ? _mm512_sub_epi8(code, _mm512_set1_epi8(static_cast<char>(OFFSET<FORMAT>))) : code);
    };
    if constexpr (FORMAT == Format::q4) {
      const V low = _mm512_set1_epi8(15);
#pragma GCC unroll 16
      for (std::size_t b = 0; b < 16; ++b) {
        const V v = codes_at<FETCH>(codes + b * VECTOR);
        give(2 * b, _mm512_and_si512(v, low));
        give(2 * b + 1, moved<4, 0x0F>(v));
      }
    } else if constexpr (FORMAT == Format::q6) {
#pragma GCC unroll 8
      for (std::size_t b = 0; b < 8; ++b) {
        const std::uint8_t *p = codes + b * 3 * VECTOR;
        const V v0 = codes_at<FETCH>(p), v1 = codes_at<FETCH>(p + VECTOR), high = codes_at<FETCH>(p + 2 * VECTOR);
        give(4 * b, select<0x0F>(v0, moved<-4, 0x30>(high)));
        give(4 * b + 1, _mm512_or_si512(moved<4, 0x0F>(v0), moved<-2, 0x30>(high)));
        give(4 * b + 2, select<0x0F>(v1, moved<0, 0x30>(high)));
        give(4 * b + 3, _mm512_or_si512(moved<4, 0x0F>(v1), moved<2, 0x30>(high)));
      }
    } else { // q8 is signed as stored
#pragma GCC unroll 32
      for (std::size_t j = 0; j < 32; ++j) {
        const V v = codes_at<FETCH>(codes + j * VECTOR);
        take(j, SIGNED ? v : _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(0x80))));
      }
    }
  }
}

WASTE_INLINE __m512 scales_at(const std::uint8_t *strip) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(strip)));
}

WASTE_INLINE V four(const std::int8_t *codes) {
  int quad;
  __builtin_memcpy(&quad, codes, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// total += sum * (scale of the weights * scale of the input)
WASTE_INLINE __m512 accumulate(__m512 total, V sum, __m512 scales, float scale) {
  return _mm512_add_ps(total, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, _mm512_set1_ps(scale))));
}

// STRIPS at a time: as many streams from memory, which one stream alone does not use up.
template <Format FORMAT, std::size_t TOKENS, std::size_t STRIPS>
static void few_of(const std::uint8_t *strip, std::size_t groups, const Int8Vector *x, float *out) {
  constexpr std::size_t CHAINS = TOKENS == 1 ? 4 : TOKENS == 2 ? 2 : 1; // vpdpbusd takes 5 cycles, two start in each
  const std::size_t stride = groups * group_bytes(FORMAT);
  const Tables t = tables<FORMAT, false>();
  __m512 total[STRIPS][TOKENS];
  for (std::size_t s = 0; s < STRIPS; ++s) {
    for (std::size_t i = 0; i < TOKENS; ++i) {
      total[s][i] = _mm512_setzero_ps();
    }
  }
  for (std::size_t g = 0; g < groups; ++g, strip += group_bytes(FORMAT)) {
    for (std::size_t s = 0; s < STRIPS; ++s) {
      const std::uint8_t *from = strip + s * stride;
      V sum[TOKENS][CHAINS];
      for (std::size_t i = 0; i < TOKENS; ++i) {
        sum[i][0] = _mm512_set1_epi32(-OFFSET<FORMAT> * x[i].sums[g]);
        for (std::size_t c = 1; c < CHAINS; ++c) {
          sum[i][c] = _mm512_setzero_si512();
        }
      }
      each_quad<FORMAT, false, true>(from + SCALES, t, [&](std::size_t j, V weights) __attribute__((always_inline)) {
        for (std::size_t i = 0; i < TOKENS; ++i) {
          sum[i][j % CHAINS] = _mm512_dpbusd_epi32(sum[i][j % CHAINS], weights, four(x[i].codes + g * GROUP + 4 * j));
        }
      });
      const __m512 scales = scales_at(from);
      for (std::size_t i = 0; i < TOKENS; ++i) {
        for (std::size_t c = 1; c < CHAINS; ++c) {
          sum[i][0] = _mm512_add_epi32(sum[i][0], sum[i][c]);
        }
        total[s][i] = accumulate(total[s][i], sum[i][0], scales, x[i].scales[g]);
      }
    }
  }
  for (std::size_t s = 0; s < STRIPS; ++s) {
    for (std::size_t i = 0; i < TOKENS; ++i) {
      _mm512_storeu_ps(out + (s * TOKENS + i) * STRIP, total[s][i]);
    }
  }
}

template <Format FORMAT, std::size_t TOKENS>
static void few_tokens(const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
                       float *out) {
  const std::size_t stride = groups * group_bytes(FORMAT);
  std::size_t s = 0;
  for (; s + STREAMS <= strips; s += STREAMS) {
    few_of<FORMAT, TOKENS, STREAMS>(strip + s * stride, groups, x, out + s * TOKENS * STRIP);
  }
  for (; s < strips; ++s) {
    few_of<FORMAT, TOKENS, 1>(strip + s * stride, groups, x, out + s * TOKENS * STRIP);
  }
}

template <Format FORMAT>
static void few_format(const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
                       std::size_t tokens, float *out) {
  switch (tokens) {
  case 1:
    return few_tokens<FORMAT, 1>(strip, strips, groups, x, out);
  case 2:
    return few_tokens<FORMAT, 2>(strip, strips, groups, x, out);
  case 3:
    return few_tokens<FORMAT, 3>(strip, strips, groups, x, out);
  default:
    return few_tokens<FORMAT, 4>(strip, strips, groups, x, out);
  }
}

static void few(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
                std::size_t tokens, float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { few_format<FORMAT>(strip, strips, groups, x, tokens, out); });
}

} // namespace
