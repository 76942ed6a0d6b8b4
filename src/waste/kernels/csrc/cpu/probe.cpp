// Sums of a buffer in four accumulators, so that nothing but the loads can be the limit.
//
// Written with intrinsics for each width, because no other form of this loop leaves the width of the loads to us:
// a probe that a compiler narrows measures the compiler.
#include "probe.hpp"

#include <cstring>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace waste {

namespace {

constexpr std::size_t LINE = 64; // bytes of a cache line

using Sum = std::uint64_t (*)(const std::uint8_t *, std::size_t, std::size_t);

// The sum of a vector's 64-bit words.
template <class V> std::uint64_t total(const V &vector) {
  std::uint64_t words[sizeof vector / 8], sum = 0;
  std::memcpy(words, &vector, sizeof words);
  for (const std::uint64_t word : words) {
    sum += word;
  }
  return sum;
}

struct Words {
  std::uint64_t word[LINE / 8];
};

template <bool Ahead> std::uint64_t sum_portable(const std::uint8_t *data, std::size_t nbytes, std::size_t ahead) {
  Words sums{};
  for (std::size_t i = 0; i < nbytes; i += LINE) {
    if constexpr (Ahead) {
      __builtin_prefetch(data + i + ahead);
    }
    Words line;
    std::memcpy(&line, data + i, LINE);
    for (std::size_t k = 0; k < LINE / 8; ++k) {
      sums.word[k] += line.word[k];
    }
  }
  return total(sums);
}

#if defined(__x86_64__)
template <bool Ahead>
__attribute__((target("avx2"))) std::uint64_t sum_avx2(const std::uint8_t *data, std::size_t nbytes,
                                                       std::size_t ahead) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  std::size_t i = 0;
  for (; i + 2 * LINE <= nbytes; i += 2 * LINE) {
    if constexpr (Ahead) {
      __builtin_prefetch(data + i + ahead);
      __builtin_prefetch(data + i + LINE + ahead);
    }
    const auto *words = reinterpret_cast<const __m256i *>(data + i);
    a = _mm256_add_epi64(a, _mm256_loadu_si256(words));
    b = _mm256_add_epi64(b, _mm256_loadu_si256(words + 1));
    c = _mm256_add_epi64(c, _mm256_loadu_si256(words + 2));
    d = _mm256_add_epi64(d, _mm256_loadu_si256(words + 3));
  }
  if (i < nbytes) {
    const auto *words = reinterpret_cast<const __m256i *>(data + i);
    a = _mm256_add_epi64(a, _mm256_loadu_si256(words));
    b = _mm256_add_epi64(b, _mm256_loadu_si256(words + 1));
  }
  return total(_mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d)));
}

template <bool Ahead>
__attribute__((target("avx512f"))) std::uint64_t sum_avx512(const std::uint8_t *data, std::size_t nbytes,
                                                            std::size_t ahead) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  std::size_t i = 0;
  for (; i + 4 * LINE <= nbytes; i += 4 * LINE) {
    if constexpr (Ahead) {
      for (std::size_t k = 0; k < 4; ++k) {
        __builtin_prefetch(data + i + k * LINE + ahead);
      }
    }
    a = _mm512_add_epi64(a, _mm512_loadu_si512(data + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(data + i + LINE));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(data + i + 2 * LINE));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(data + i + 3 * LINE));
  }
  for (; i < nbytes; i += LINE) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(data + i));
  }
  return total(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}
#endif

template <bool Ahead> Sum widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    return sum_avx512<Ahead>;
  }
  if (__builtin_cpu_supports("avx2")) {
    return sum_avx2<Ahead>;
  }
#endif
  return sum_portable<Ahead>;
}

double now() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  constexpr clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
#else
  constexpr clockid_t clock = CLOCK_MONOTONIC;
#endif
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

} // namespace

Reading read_stream(const std::uint8_t *data, std::size_t nbytes, std::size_t passes, std::size_t ahead) {
  const Sum sum = ahead > 0 ? widest<true>() : widest<false>();
  Reading found{0, 0.0};
  const double began = now();
  for (std::size_t pass = 0; pass < passes; ++pass) {
    found.sum += sum(data, nbytes, ahead);
  }
  found.seconds = now() - began;
  return found;
}

} // namespace waste
