// Products of strips with inputs of 8 bits: what the code for each instruction set provides.
//
// An input vector is cut into groups of 128 (rotated first where the weights are), each with a scale of its own:
// x = code * scale, codes in -127 .. 127. A strip times a vector is then, for each of its 16 rows,
//
//   sum over groups of float(sum of weight code * input code) * (weight scale * input scale)
//
// The inner sum is a whole number below 2^23, the same in any order and on any processor; the outer one is taken in
// order of the groups, one multiplication and one addition at a time. So all code for it agrees in every bit.
#pragma once

#include "weight.hpp"

namespace waste {

// A vector of `groups` groups, made by lanes/input.cpp.
struct Int8Vector {
  std::int8_t *codes;  // (groups * 128)
  float *scales;       // (groups), for rotated weights times RESCALE
  std::int32_t *sums;  // (groups), of the codes
};

// Most vectors that one strip is multiplied with while it is decoded in registers. With more, `many` is the faster one.
constexpr std::size_t FEW = 4;

// Most vectors of one call of `many`: their sums take 8 KB for each strip and stay in the first-level cache.
constexpr std::size_t MANY = 128;

constexpr std::size_t PACKED = 16; // vectors that are rearranged together

struct Int8Kernels {
  // out (strips, tokens, 16) = neighbouring strips times each of `tokens` <= FEW vectors.
  void (*few)(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
              std::size_t tokens, float *out);

  // The same for up to MANY vectors and `strips` <= `together` neighbouring strips: out (strips, tokens, 16). Decodes
  // each group once. `packed` comes from `pack`, where there is one.
  void (*many)(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *x,
               const void *packed, std::size_t tokens, float *out);
  std::size_t together;

  // Vectors rearranged for `many`, PACKED at a time, those from `first` on; null where it takes them as they are.
  std::size_t (*packed_bytes)(std::size_t groups, std::size_t tokens);
  void (*pack)(const Int8Vector *x, std::size_t groups, std::size_t tokens, std::size_t first, void *packed);
};

extern const Int8Kernels INT8_PORTABLE;
#if defined(WASTE_X86)
extern const Int8Kernels INT8_AVX2, INT8_AVX512, INT8_AMX;
#endif

// Those of the instruction set in use (isa.hpp).
const Int8Kernels &int8_kernels();

} // namespace waste
