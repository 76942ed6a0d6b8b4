// The encoder in AVX-512 with VNNI and VBMI: sixteen lanes, a whole strip. Compiled for these and called only where
// the processor has them.
#include "encode_strip.hpp"

#include <immintrin.h>

namespace waste {

namespace {

struct Avx512 {
  static constexpr std::size_t N = 16;
  using I = std::int32_t __attribute__((vector_size(64)));
  using U = std::uint32_t __attribute__((vector_size(64)));
  using F = float __attribute__((vector_size(64)));

  static WASTE_INLINE I dot(I sum, I pair, const std::int32_t *entry) {
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pair, _mm512_set1_epi32(*entry));
  }
  static WASTE_INLINE F look(I window, const Tables &tables) {
    const I found = (I)_mm512_permutexvar_epi8((__m512i)window, _mm512_loadu_si512(tables.bytes));
    return __builtin_convertvector((found << 24) >> 24, F);
  }
};

} // namespace

EncodeLoss encode_strip_avx512(const EncodeJob &job) { return encode_strip<Avx512>(job); }

} // namespace waste
