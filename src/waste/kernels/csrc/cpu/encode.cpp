// Which encoder a processor gets, and one item of work per strip.
#include "encode.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace waste {

namespace {

// Work on a weight in multiply-adds, for the pool: two passes of three rounds of 128 branches, 16 lanes wide.
constexpr std::size_t WORK = 50;

} // namespace

EncodeLoss encode(Pool &pool, const float *w, Format format, std::size_t rows, std::size_t cols,
                  const float *importance, Isa isa, std::uint8_t *out) {
  if (!rotated(format)) {
    throw std::invalid_argument("only rotated formats have a native encoder");
  }
  if (!usable(isa)) {
    throw std::invalid_argument("this processor has no such instruction set");
  }
  auto strip = encode_strip_portable;
#if defined(WASTE_X86)
  if (isa != Isa::portable) { // amx has no part in encoding
    strip = isa == Isa::avx2 ? encode_strip_avx2 : encode_strip_avx512;
  }
#endif
  const std::size_t bytes = ceil_div(cols, GROUP) * group_bytes(format);
  std::atomic<std::uint64_t> bad{0}, saturated{0};
  Stage stage(pool);
  stage.parallel(ceil_div(rows, STRIP), rows * cols * WORK, [&](std::size_t i, std::size_t) {
    const std::size_t begin = i * STRIP;
    const EncodeLoss loss = strip({static_cast<int>(format), w + begin * cols, std::min(STRIP, rows - begin), cols,
                                   importance, out + i * bytes});
    bad += loss.bad;
    saturated += loss.saturated;
  });
  return {bad, saturated};
}

} // namespace waste
