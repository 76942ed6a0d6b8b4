// Products with rows of row-major matrices and decoding of every format: which of the loops a format takes.
#include "dot.hpp"

#include "lanes/lanes.hpp"

#include <algorithm>
#include <cstring>

namespace waste {

namespace {

const float *f32_row(const Weight &w, std::size_t row) {
  return reinterpret_cast<const float *>(w.data) + row * w.cols;
}

const std::uint16_t *bf16_row(const Weight &w, std::size_t row) {
  return reinterpret_cast<const std::uint16_t *>(w.data) + row * w.cols;
}

} // namespace

void dot_rows(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
              float *const *y, std::size_t first) {
  const RowLanes &rows = lanes().rows;
  if (w.format == Format::f32) {
    rows.f32(f32_row(w, begin), w.cols, end - begin, x, tokens, y, begin - first);
  } else {
    rows.bf16(bf16_row(w, begin), w.cols, end - begin, x, tokens, y, begin - first);
  }
}

void dot_rows_f64(const Weight &w, std::size_t begin, std::size_t end, const float *const *x, std::size_t tokens,
                  double *const *y) {
  const RowLanes &rows = lanes().rows;
  if (w.format == Format::f32) {
    rows.f32_f64(f32_row(w, begin), w.cols, end - begin, x, tokens, y, begin);
  } else {
    rows.bf16_f64(bf16_row(w, begin), w.cols, end - begin, x, tokens, y, begin);
  }
}

namespace {

// Rows begin <= row < end of block `block`, one behind the other.
void decode_rows(const Weight &w, std::size_t block, std::size_t begin, std::size_t end, float *out) {
  const std::size_t base = block * STRIP;
  switch (w.format) {
  case Format::f32:
    std::memcpy(out, f32_row(w, begin), (end - begin) * w.cols * sizeof(float));
    return;
  case Format::bf16:
    return lanes().decode.bf16(bf16_row(w, begin), (end - begin) * w.cols, out);
  default:
    return lanes().decode.strip(w.format, w.strip(block), w.cols, begin - base, end - base, out);
  }
}

} // namespace

void decode_block(const Weight &w, std::size_t block, float *out) {
  decode_rows(w, block, block * STRIP, std::min((block + 1) * STRIP, w.rows), out);
}

void decode_row(const Weight &w, std::size_t row, float *out) { decode_rows(w, row / STRIP, row, row + 1, out); }

} // namespace waste
