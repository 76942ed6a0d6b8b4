// Products of the heads of one query with rows of a matrix, in tiles that live in registers.
//
// Heads lie across lanes, so nothing ever crosses lanes: a number of a row is spread over a vector and multiplies the
// same channel of many heads. Every sum is one lane of one accumulator with its terms in ascending order, so neither
// the shape of a tile nor the width of a vector changes a bit. Fusing multiplication and addition does: it rounds once
// where the others round twice, and is 1.75 times as fast (LEARNED: attention-limits).
#pragma once

#include "native.hpp"

namespace waste::WASTE_ISA {

namespace {

// a * b + c, rounded once if FUSED and where there is such an instruction.
template <bool FUSED> WASTE_INLINE Floats madd(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  if constexpr (FUSED) {
    return as<Floats>(_mm512_fmadd_ps(as<__m512>(a), as<__m512>(b), as<__m512>(c)));
  }
#elif defined(__FMA__)
  if constexpr (FUSED) {
    return as<Floats>(_mm256_fmadd_ps(as<__m256>(a), as<__m256>(b), as<__m256>(c)));
  }
#endif
  return a * b + c;
}

// The tile that the registers hold: 4 x 6 of 32, 2 x 4 of 16, which leaves room for the operands.
constexpr std::size_t TILE_VECTORS = MANY_REGISTERS ? 4 : 2, TILE_NUMBERS = MANY_REGISTERS ? 6 : 4;

// acc[m][n] += sum over i < count of number(i, m) * vectors[i * stride + n * FLOATS], i ascending.
template <bool FUSED, std::size_t N, std::size_t M, class Number>
WASTE_INLINE void tile(const float *vectors, std::size_t stride, std::size_t count, const Number &number,
                       Floats (&acc)[M][N]) {
  for (std::size_t i = 0; i < count; ++i) {
    Floats head[N];
    for (std::size_t n = 0; n < N; ++n) {
      head[n] = floats(vectors + i * stride + n * FLOATS);
    }
    for (std::size_t m = 0; m < M; ++m) {
      // A number in every lane. Unlike adding to zero, taking zero away changes no number and costs no instruction.
      const Floats x = number(i, m) - Floats{};
      for (std::size_t n = 0; n < N; ++n) {
        acc[m][n] = madd<FUSED>(x, head[n], acc[m][n]);
      }
    }
  }
}

// Channels whose products are summed before they join the rest: the queries' share of them (24 KiB for 64 heads) stays
// in the first-level cache, and errors grow with the root of 96, not of the whole row.
constexpr std::size_t CHANNELS = 96;

template <bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void score_tile(const float *q, std::size_t wide, const float *const *rows, std::size_t from,
                             std::size_t to, float *score) {
  const float *row[M];
  for (std::size_t m = 0; m < M; ++m) {
    row[m] = rows[m] + from;
  }
  Floats acc[M][N]{};
  tile<FUSED, N, M>(q + from * wide, wide, to - from, [&row](std::size_t r, std::size_t m) { return row[m][r]; },
                       acc);
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      float *at = score + m * wide + n * FLOATS;
      store(at, from == 0 ? acc[m][n] : floats(at) + acc[m][n]);
    }
  }
}

template <bool FUSED, std::size_t N, std::size_t M>
WASTE_INLINE void score_heads(const float *q, std::size_t wide, const float *const *rows, std::size_t count,
                              std::size_t from, std::size_t to, float *score) {
  std::size_t j = 0;
  for (; j + M <= count; j += M) {
    score_tile<FUSED, N, M>(q, wide, rows + j, from, to, score + j * wide);
  }
  for (; j < count; ++j) {
    score_tile<FUSED, N, 1>(q, wide, rows + j, from, to, score + j * wide);
  }
}

// score (count, wide) = rows[j] . q, for q (channels, wide): `wide` heads, a multiple of 16, in lanes.
template <bool FUSED>
WASTE_INLINE void scores(const float *q, std::size_t wide, std::size_t channels, const float *const *rows,
                         std::size_t count, float *score) {
  for (std::size_t from = 0; from < channels; from += CHANNELS) {
    const std::size_t to = channels < from + CHANNELS ? channels : from + CHANNELS;
    std::size_t h = 0;
    for (; h + TILE_VECTORS * FLOATS <= wide; h += TILE_VECTORS * FLOATS) {
      score_heads<FUSED, TILE_VECTORS, TILE_NUMBERS>(q + h, wide, rows, count, from, to, score + h);
    }
    if (TILE_VECTORS == 4 && h + 2 * FLOATS <= wide) {
      score_heads<FUSED, 2, 8>(q + h, wide, rows, count, from, to, score + h);
      h += 2 * FLOATS;
    }
    for (; h < wide; h += FLOATS) {
      score_heads<FUSED, 1, 8>(q + h, wide, rows, count, from, to, score + h);
    }
  }
}

} // namespace

} // namespace waste::WASTE_ISA
