// What the rotated formats have in common: the sign flips, the fixed factor of their scales, and the trained tables.
//
// Constants only, no functions: the encoder's files, each compiled for its own instruction set, include this too.
#pragma once

#include "weight.hpp"

#include <cstddef>
#include <cstdint>

namespace waste {

// A table of the window trellis: 64 entries of at most 63 in magnitude (7 bits: sums of two products of bytes then fit
// 16 bits), odd (steps[63 - w] = -steps[w]), trained on unit Gaussian weights; `unit` table steps are one standard
// deviation. Held-out error of the three: .2866, .1514 and .0805, the same as with 8-bit entries.
struct WtTable {
  std::int8_t steps[64];
  float unit;
};

constexpr WtTable WT2 = {{25,  -52, -12, 7,   3,   19,  -17, 45,  29,  -8, -37, 10,  -26, -4,  11,  41,
                          0,   17,  -25, 63,  -32, 5,   32,  -11, -5,  43, 16,  -26, 6,   -17, 31,  16,
                          -16, -31, 17,  -6,  26,  -16, -43, 5,   11,  -32, -5, 32,  -63, 25,  -17, 0,
                          -41, -11, 4,   26,  -10, 37,  8,   -29, -45, 17, -19, -3,  -7,  12,  52,  -25},
                         24.7059f};
constexpr WtTable WT3 = {{-63, 25,  17,  6,   -29, -13, -2, 36, -18, 18, -2,  -28, -41, 38,  -10, 9,
                          32,  -25, -12, 12,  4,   21,  -51, -5, 18, 33, 46,  -14, -22, -5,  9,   2,
                          -2,  -9,  5,   22,  14,  -46, -33, -18, 5, 51, -21, -4,  -12, 12,  25,  -32,
                          -9,  10,  -38, 41,  28,  2,   -18, 18, -36, 2, 13,  29,  -6,  -17, -25, 63},
                         21.5753f};
constexpr WtTable WT4 = {{-63, -42, -33, -27, -21, -16, -12, -8, -4, 0,  4,  8,  13, 18, 25, 36,
                          -52, -37, -27, -21, -16, -12, -8,  -4, 0,  4,  8,  12, 17, 23, 30, 45,
                          -45, -30, -23, -17, -12, -8,  -4,  0,  4,  8,  12, 16, 21, 27, 37, 52,
                          -36, -25, -18, -13, -8,  -4,  0,   4,  8,  12, 16, 21, 27, 33, 42, 63},
                         19.3252f};

namespace {

// That of a trellis format.
template <Format FORMAT>
constexpr const WtTable &TABLE = FORMAT == Format::wt2 ? WT2 : FORMAT == Format::wt3 ? WT3 : WT4;

} // namespace

// Weights flipped before the Hadamard transform: bit k % 32 of word k / 32, the same for every 128 columns. Without
// them a common mean along k ends up in one outlier; of 20,000 random patterns this one has the flattest Walsh
// spectrum (at most 22 where a constant row would give 128).
constexpr std::uint32_t SIGNS[4] = {0x91e9bda3u, 0x9be54357u, 0x6e102151u, 0x6d4cf047u};

// Stored scale = half(scale * SCALE_FACTOR). The steps of trained weights (.0005 to .005) lie at the lower end of what
// a half holds in full precision; the factor moves them to its middle.
constexpr float SCALE_FACTOR = 256.0f;
constexpr float HADAMARD = 0.08838834764831845f; // 1 / sqrt(128): makes the transform its own inverse
constexpr float RESCALE = HADAMARD / SCALE_FACTOR; // of a product of unnormalised transforms, scale as stored

} // namespace waste
