// One strip of 16 rows to encode, and the functions that do it: one for each instruction set.
//
// Included by files that are compiled for more than the baseline, so nothing here may turn into code of its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace waste {

struct EncodeJob {
  int format;              // of `Format`: wt2, wt3, wt4, q6
  const float *w;          // (rows, cols), row-major
  std::size_t rows;        // 1 to 16; the missing ones count as zeros
  std::size_t cols;        // any; padded to 128 with zeros
  const float *importance; // one weight >= 0 per rotated column (cols padded to 128), or null
  std::uint8_t *out;       // the strip in kernel layout
};

// Strip groups (16 x 128 weights) that came out wrong.
struct EncodeLoss {
  std::uint64_t bad;       // hold NaN, infinities or weights beyond 1e18: written as zeros
  std::uint64_t saturated; // hold a scale beyond what a half can: clipped
};

EncodeLoss encode_strip_portable(const EncodeJob &job);
EncodeLoss encode_strip_avx2(const EncodeJob &job);
EncodeLoss encode_strip_avx512(const EncodeJob &job);

} // namespace waste
