// The encoder for any processor: four lanes of the compiler's own vectors.
#include "encode_strip.hpp"

namespace waste {

namespace {

struct Portable {
  static constexpr std::size_t N = 4;
  using I = std::int32_t __attribute__((vector_size(16)));
  using U = std::uint32_t __attribute__((vector_size(16)));
  using F = float __attribute__((vector_size(16)));

  static WASTE_INLINE I dot(I sum, I pair, const std::int32_t *entry) {
    return sum + ((pair << 16) >> 16) * static_cast<std::int16_t>(*entry) + (pair >> 16) * (*entry >> 16);
  }
  static WASTE_INLINE F look(I window, const Tables &tables) {
    const float *t = tables.steps;
    return F{t[window[0]], t[window[1]], t[window[2]], t[window[3]]};
  }
};

} // namespace

EncodeLoss encode_strip_portable(const EncodeJob &job) { return encode_strip<Portable>(job); }

} // namespace waste
