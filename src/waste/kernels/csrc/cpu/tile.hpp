// Products of the heads of one query with rows of a matrix, in tiles that live in registers.
//
// Heads lie across lanes, so nothing ever crosses lanes: a number of a row is spread over a vector and multiplies the
// same channel of many heads. Every sum is one lane of one accumulator with its terms in ascending order, so neither
// the shape of a tile nor the width of a vector changes a bit. Fusing multiplication and addition does: it rounds once
// where the others round twice, and is 1.75 times as fast (LEARNED: attention-limits).
//
// Of an anonymous namespace: what is compiled for one instruction set stays in its file.
#pragma once

#include "simd.hpp"

#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h> // declares the builtins
#define WASTE_X86_BUILTINS
#endif

namespace waste {

namespace {

using f32x4 = float __attribute__((vector_size(16)));

// a * b + c, rounded once if FUSED: for code of level 3 and above.
template <bool FUSED, class V> WASTE_INLINE V madd(V a, V b, V c) {
#if defined(WASTE_X86_BUILTINS)
  if constexpr (FUSED && sizeof(V) == 64) {
    return (V)__builtin_ia32_vfmaddps512_mask((__v16sf)a, (__v16sf)b, (__v16sf)c, static_cast<__mmask16>(-1),
                                              _MM_FROUND_CUR_DIRECTION);
  } else if constexpr (FUSED && sizeof(V) == 32) {
    return (V)__builtin_ia32_vfmaddps256((__v8sf)a, (__v8sf)b, (__v8sf)c);
  }
#endif
  return a * b + c;
}

// One register of floats in each version of a function, and the tile that its registers hold: 4 x 6 of the 32 in
// AVX-512, 2 x 4 of the 16 elsewhere, which leaves room for the operands.
template <int LEVEL> struct Tile {
  using V = f32x4;
  static constexpr std::size_t VECTORS = 2, NUMBERS = 4;
};
template <> struct Tile<3> {
  using V = f32x8;
  static constexpr std::size_t VECTORS = 2, NUMBERS = 4;
};
template <> struct Tile<4> {
  using V = f32x16;
  static constexpr std::size_t VECTORS = 4, NUMBERS = 6;
};

// q (heads, channels) times a factor, with heads in lanes: out (channels, wide), zeros behind the last head.
WASTE_INLINE void heads_in_lanes(const float *q, std::size_t heads, std::size_t wide, std::size_t channels,
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

// acc[m][n] += sum over i < count of number(i, m) * vectors[i * stride + n * lanes], i ascending.
template <class V, bool FUSED, std::size_t N, std::size_t M, class Number>
WASTE_INLINE void tile(const float *vectors, std::size_t stride, std::size_t count, const Number &number,
                       V (&acc)[M][N]) {
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  for (std::size_t i = 0; i < count; ++i) {
    V head[N];
    for (std::size_t n = 0; n < N; ++n) {
      head[n] = load<V>(vectors + i * stride + n * lanes);
    }
    for (std::size_t m = 0; m < M; ++m) {
      // A number in every lane. Unlike adding to zero, taking zero away changes no number and costs no instruction; and
      // a function that returned it would be compiled for the baseline, element by element.
      const V x = number(i, m) - V{};
      for (std::size_t n = 0; n < N; ++n) {
        acc[m][n] = madd<FUSED>(x, head[n], acc[m][n]);
      }
    }
  }
}

// Channels whose products are summed before they join the rest: the queries' share of them (24 KiB for 64 heads) stays
// in the first-level cache, and errors grow with the root of 96, not of the whole row.
constexpr std::size_t CHANNELS = 96;

// Rows that are scored at a time: a whole number of tiles, 24 KiB of scores of 64 heads.
constexpr std::size_t ROWS = 96;

template <class V, bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void score_tile(const float *q, std::size_t wide, const float *const *rows, std::size_t from,
                             std::size_t to, float *score) {
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  const float *row[M];
  for (std::size_t m = 0; m < M; ++m) {
    row[m] = rows[m] + from;
  }
  V acc[M][N]{};
  tile<V, FUSED, N, M>(q + from * wide, wide, to - from, [&row](std::size_t r, std::size_t m) { return row[m][r]; },
                       acc);
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      float *at = score + m * wide + n * lanes;
      store(at, from == 0 ? acc[m][n] : load<V>(at) + acc[m][n]);
    }
  }
}

template <class V, bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void score_heads(const float *q, std::size_t wide, const float *const *rows, std::size_t count,
                              std::size_t from, std::size_t to, float *score) {
  std::size_t j = 0;
  for (; j + M <= count; j += M) {
    score_tile<V, FUSED, N, M>(q, wide, rows + j, from, to, score + j * wide);
  }
  for (; j < count; ++j) {
    score_tile<V, FUSED, N, 1>(q, wide, rows + j, from, to, score + j * wide);
  }
}

// score (count, wide) = rows[j] . q, for q (channels, wide): `wide` heads, a multiple of 16, in lanes.
template <int LEVEL, bool FUSED>
WASTE_INLINE void scores(const float *q, std::size_t wide, std::size_t channels, const float *const *rows,
                         std::size_t count, float *score) {
  using T = Tile<LEVEL>;
  using V = typename T::V;
  constexpr std::size_t lanes = sizeof(V) / sizeof(float);
  for (std::size_t from = 0; from < channels; from += CHANNELS) {
    const std::size_t to = channels < from + CHANNELS ? channels : from + CHANNELS;
    std::size_t h = 0;
    for (; h + T::VECTORS * lanes <= wide; h += T::VECTORS * lanes) {
      score_heads<V, FUSED, T::VECTORS, T::NUMBERS>(q + h, wide, rows, count, from, to, score + h);
    }
    if (T::VECTORS == 4 && h + 2 * lanes <= wide) {
      score_heads<V, FUSED, 2, 8>(q + h, wide, rows, count, from, to, score + h);
      h += 2 * lanes;
    }
    for (; h < wide; h += lanes) {
      score_heads<V, FUSED, 1, 8>(q + h, wide, rows, count, from, to, score + h);
    }
  }
}

} // namespace

} // namespace waste
