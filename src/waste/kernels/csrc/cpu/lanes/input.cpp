// Inputs of products in 8 bits (../int8.hpp), rotated first where the weights are.
#include "lanes.hpp"

#include "../wt_tables.hpp"
#include "native.hpp"

#include <utility>

namespace waste::WASTE_ISA {

namespace {

using Whole = decltype(Floats{} > Floats{}); // as many int32
using Bytes = std::int8_t __attribute__((vector_size(FLOATS)));

constexpr std::size_t COUNT = GROUP / FLOATS; // registers of a group
constexpr std::make_index_sequence<FLOATS> ALL;

// The flips as factors: bits tested one by one took nine times as long as the transform.
struct Flips {
  float of[GROUP];
};

constexpr Flips FLIPS = [] {
  Flips found{};
  for (std::size_t k = 0; k < GROUP; ++k) {
    found.of[k] = SIGNS[k / 32] >> k % 32 & 1 ? -1.0f : 1.0f;
  }
  return found;
}();

// One step of the transform inside a register: pairs of lanes `HALF` apart.
template <std::size_t HALF, std::size_t... I> WASTE_INLINE Floats butterfly(Floats v, std::index_sequence<I...>) {
  if constexpr (HALF < FLOATS) {
    return __builtin_shufflevector(v, v, (I ^ HALF)...) + v * Floats{(I & HALF ? -1.0f : 1.0f)...};
  } else {
    return v;
  }
}

// Sign flips, then Hadamard over 128 numbers, unnormalised: additions alone, neighbours first, whatever the registers.
WASTE_INLINE void rotate(Floats *v) {
  for (std::size_t i = 0; i < COUNT; ++i) {
    v[i] *= load<Floats>(FLIPS.of + i * FLOATS);
    v[i] = butterfly<1>(v[i], ALL);
    v[i] = butterfly<2>(v[i], ALL);
    v[i] = butterfly<4>(v[i], ALL);
    v[i] = butterfly<8>(v[i], ALL);
  }
#pragma GCC unroll 8
  for (std::size_t half = 1; half < COUNT; half *= 2) {
#pragma GCC unroll 16
    for (std::size_t begin = 0; begin < COUNT; begin += 2 * half) {
#pragma GCC unroll 16
      for (std::size_t i = begin; i < begin + half; ++i) {
        const Floats a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
    }
  }
}

// The lanes joined, in any order.
template <class Join> WASTE_INLINE std::int32_t joined(Whole v, const Join &join) {
  std::int32_t lane[FLOATS], found;
  store(lane, v);
  found = lane[0];
  for (std::size_t i = 1; i < FLOATS; ++i) {
    found = join(found, lane[i]);
  }
  return found;
}

#if defined(__AVX512F__)
WASTE_INLINE std::int32_t largest_of(Whole v) { return _mm512_reduce_max_epi32(as<__m512i>(v)); }
WASTE_INLINE std::int32_t sum_of(Whole v) { return _mm512_reduce_add_epi32(as<__m512i>(v)); }
#else
WASTE_INLINE std::int32_t largest_of(Whole v) {
  return joined(v, [](std::int32_t a, std::int32_t b) { return a > b ? a : b; });
}
WASTE_INLINE std::int32_t sum_of(Whole v) {
  return joined(v, [](std::int32_t a, std::int32_t b) { return a + b; });
}
#endif

// 128 inputs as codes: the largest magnitude gets code 127, rounding is to nearest, ties to even.
WASTE_INLINE void quantise_group(const Floats *v, float rescale, std::int8_t *codes, float *scale, std::int32_t *sum) {
  constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
  Whole top{};
  for (std::size_t i = 0; i < COUNT; ++i) {
    const Whole magnitude = as<Whole>(v[i]) & 0x7fffffff; // as whole numbers they keep their order
    top = magnitude > top ? magnitude : top;
  }
  const std::int32_t most = largest_of(top);
  const float largest = as<float>(most);
  if (most >= 0x7f800000) {
    *scale = __builtin_nanf("");
    *sum = 0;
    __builtin_memset(codes, 0, GROUP);
    return;
  }
  const bool vanishing = largest < 1e-30f; // 127 / largest must not overflow
  const float inverse = vanishing ? 0.0f : 127.0f / largest;
  *scale = vanishing ? 0.0f : largest / 127.0f * rescale;
  Whole total{};
  for (std::size_t i = 0; i < COUNT; ++i) {
    const Whole code = as<Whole>(v[i] * inverse + ROUND) - as<Whole>(Floats{} + ROUND);
    store(codes + i * FLOATS, __builtin_convertvector(code, Bytes));
    total += code;
  }
  *sum = sum_of(total);
}

void quantise(const float *x, std::size_t cols, bool rotated, std::int8_t *codes, float *scales, std::int32_t *sums) {
  for (std::size_t g = 0, at = 0; at < cols; ++g, at += GROUP) {
    Floats v[COUNT];
    if (cols - at >= GROUP) {
      for (std::size_t i = 0; i < COUNT; ++i) {
        v[i] = load<Floats>(x + at + i * FLOATS);
      }
    } else {
      __builtin_memset(v, 0, sizeof v);
      __builtin_memcpy(v, x + at, (cols - at) * sizeof(float));
    }
    if (rotated) {
      rotate(v);
    }
    quantise_group(v, rotated ? RESCALE : 1.0f, codes + at, scales + g, sums + g);
  }
}

} // namespace

const InputLanes INPUT = {quantise};

} // namespace waste::WASTE_ISA
