// The encoder in AVX2: eight lanes. Compiled with -mavx2 and called only where the processor has it.
#include "encode_strip.hpp"

#include <immintrin.h>

namespace waste {

namespace {

struct Avx2 {
  static constexpr std::size_t N = 8;
  using I = std::int32_t __attribute__((vector_size(32)));
  using U = std::uint32_t __attribute__((vector_size(32)));
  using F = float __attribute__((vector_size(32)));

  static WASTE_INLINE I dot(I sum, I pair, const std::int32_t *entry) {
    return sum + (I)_mm256_madd_epi16((__m256i)pair, _mm256_set1_epi32(*entry));
  }
  static WASTE_INLINE F look(I window, const Tables &tables) {
    return (F)_mm256_i32gather_ps(tables.steps, (__m256i)window, 4);
  }
};

} // namespace

EncodeLoss encode_strip_avx2(const EncodeJob &job) { return encode_strip<Avx2>(job); }

} // namespace waste
