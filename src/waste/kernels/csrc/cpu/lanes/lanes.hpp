// The loops that are compiled once per instruction set, as tables of function pointers.
//
// Every file of this folder but lanes.cpp is built several times, with WASTE_ISA naming the namespace (portable, avx2,
// avx512) and the flags that go with it (CMakeLists.txt). It keeps its functions to itself and defines one table;
// table.cpp joins the tables of a set. Nothing else may leave such a file, above all no inline function of the standard
// library that the linker could keep for everybody: check_symbols.cmake looks.
#pragma once

#include "../isa.hpp"
#include "../weight.hpp"

#include <cstddef>
#include <cstdint>

namespace waste {

constexpr std::size_t HC_STREAMS = 16; // most residual streams

// vector.cpp: vectors of any length. out may be x.
struct VectorLanes {
  double (*sum_squares)(const float *x, std::size_t n);
  void (*rms_norm)(const float *x, const float *w, std::size_t n, double eps, float *out);
  void (*swiglu)(float *gate, const float *up, std::size_t n, float limit);
  void (*scale)(float *x, std::size_t n, float scale);
  void (*add)(const float *x, const float *y, std::size_t n, float *out);
};

// streams.cpp: sums over several vectors of n numbers that lie `stride` numbers apart, always in their order.
struct StreamLanes {
  // out = (x[0] + x[1] + ...) * (1 / count)
  void (*mean)(const float *x, std::size_t stride, std::size_t count, std::size_t n, float *out);
  // out = 0 + weight[0] * x[0] + weight[1] * x[1] + ..., then + more unless null
  void (*weighted)(const float *x, std::size_t stride, const float *weight, std::size_t count, const float *more,
                   std::size_t n, float *out);
  // In place: x[i] = post[i] * out + comb[0, i] * x[0] + comb[1, i] * x[1] + ...; count <= HC_STREAMS
  void (*mix)(float *x, std::size_t stride, const float *post, const float *comb, std::size_t count, const float *out,
              std::size_t n);
};

// rows.cpp: products of row-major matrices. y[t][at + r] = w[r] . x[t] for r < count; w (count, cols).
struct RowLanes {
  void (*f32)(const float *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
              float *const *y, std::size_t at);
  void (*bf16)(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
               float *const *y, std::size_t at);
  // Accumulated in float64.
  void (*f32_f64)(const float *w, std::size_t cols, std::size_t count, const float *const *x, std::size_t tokens,
                  double *const *y, std::size_t at);
  void (*bf16_f64)(const std::uint16_t *w, std::size_t cols, std::size_t count, const float *const *x,
                   std::size_t tokens, double *const *y, std::size_t at);
};

// input.cpp
struct InputLanes {
  // x (cols) in groups of 128: codes (groups * 128), scales (groups), times RESCALE where rotated, and the sums of each
  // group's codes. Groups that hold NaN or infinities become NaN; those below 1e-30 become zero.
  void (*quantise)(const float *x, std::size_t cols, bool rotate, std::int8_t *codes, float *scales,
                   std::int32_t *sums);
};

// decode.cpp: stored weights as floats.
struct DecodeLanes {
  void (*bf16)(const std::uint16_t *w, std::size_t n, float *out);
  // Rows begin <= row < end of a strip: out (end - begin, cols).
  void (*strip)(Format format, const std::uint8_t *strip, std::size_t cols, std::size_t begin, std::size_t end,
                float *out);
};

constexpr std::size_t KDA_COLUMNS = 64; // most of a state that pass together

// Tokens whose rows are asked for ahead: they lie in pages of their own, where no hardware prefetcher finds the next one.
constexpr std::size_t KDA_AHEAD = 8;

// kda.cpp: one head. Rows of `wide` numbers, a multiple of 16, zeros from dim on; the inputs' rows lie `stride` apart.
struct KdaLanes {
  // out (T, wide) = silu of the causal convolution of in (T, stride). past (taps - 1, stride), kernel (taps, wide)
  void (*convolve)(const float *in, const float *past, const float *kernel, std::size_t tokens, std::size_t taps,
                   std::size_t stride, std::size_t dim, std::size_t wide, float *out);
  // x (T, wide) / sqrt(sum(x^2) + 1e-6) * factor, in float64: the epsilon is inside the root.
  void (*unit)(float *x, std::size_t tokens, std::size_t wide, double factor);
  // decay (T, wide) = exp(bound * sigmoid(rate * (f + bias))) if bounded, else exp(-rate * softplus(f + bias)), and
  // ask = k * decay: what the decayed state is asked for. f (T, stride)
  void (*decay)(const float *f, std::size_t stride, const float *bias, float rate, bool bounded, float bound,
                std::size_t tokens, std::size_t dim, std::size_t wide, const float *k, float *decay, float *ask);
  void (*gate)(float *x, const float *gate, std::size_t dim); // x *= sigmoid(gate)
  // The delta rule, token by token: s = decay (rows) * s; s += outer(k, beta * (v - k @ s)); out = q @ s.
  // s (keys, wide); q, k, decay, ask, v, out (T, wide); beta (T). work (keys, KDA_COLUMNS) is scratch.
  void (*steps)(float *s, std::size_t keys, std::size_t tokens, std::size_t wide, const float *q, const float *k,
                const float *decay, const float *ask, const float *v, const float *beta, float *work, float *out);
};

constexpr std::size_t MLA_HEADS = 64;      // that lie across lanes together: four AVX-512 registers
constexpr std::size_t ATTENTION_ROWS = 96; // scored at a time: a whole number of tiles, 24 KiB of scores of 64 heads

// mla.cpp: `wide` <= MLA_HEADS heads of one query, a multiple of 16.
struct MlaLanes {
  // One run of attended rows, begin <= j < end. q (row, wide), scaled. Of the rows' softmax the largest score, the sum
  // of e^(score - top), and the mix (width, wide) they weigh. score (ATTENTION_ROWS, wide) is scratch.
  void (*segment)(const float *q, std::size_t wide, const float *cache, std::size_t row, const std::int32_t *positions,
                  std::size_t begin, std::size_t end, std::size_t width, float *score, float *top, double *total,
                  float *mixed);
  // mixed (heads, width) = the segments' mixes (width, wide each, `stride` numbers apart), weighed by their shares of
  // the softmax over all of them. top, total (segments, MLA_HEADS); share (segments, MLA_HEADS) is scratch.
  void (*join)(const float *part, std::size_t stride, std::size_t segments, const float *top, const double *total,
               std::size_t heads, std::size_t wide, std::size_t width, float *share, float *mixed);
};

// index.cpp
struct IndexLanes {
  // score[j] = sum over heads of weight[h] * relu(q[h] . key j), for pools begin <= j < end. q (d, wide): scaled, heads
  // in lanes; weight (wide). likeness (ATTENTION_ROWS, wide) is scratch.
  void (*scores)(const float *q, const float *weight, const float *keys, std::size_t begin, std::size_t end,
                 std::size_t wide, std::size_t d, float *likeness, double *score);
};

struct Lanes {
  Isa isa; // the one it was compiled for
  const VectorLanes &vector;
  const StreamLanes &streams;
  const RowLanes &rows;
  const InputLanes &input;
  const DecodeLanes &decode;
  const KdaLanes &kda;
  const MlaLanes &mla;
  const IndexLanes &index;
};

// Those of the instruction set to use now (isa.hpp). Ask once per stage or call: a set that is forced meanwhile shows
// from the next question on.
const Lanes &lanes();

#if defined(WASTE_ISA)
namespace WASTE_ISA {
extern const VectorLanes VECTOR;
extern const StreamLanes STREAMS;
extern const RowLanes ROWS;
extern const InputLanes INPUT;
extern const DecodeLanes DECODE;
extern const KdaLanes KDA;
extern const MlaLanes MLA;
extern const IndexLanes INDEX;
} // namespace WASTE_ISA
#endif

} // namespace waste
