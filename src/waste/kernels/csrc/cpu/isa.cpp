// What the processor has, asked once, and the choice that was forced.
#include "isa.hpp"

#include <atomic>
#include <stdexcept>

#if defined(WASTE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace waste {

namespace {

// Tiles are 8 KiB of state a thread, so Linux (5.16 and later) hands them out on demand only: arch_prctl(2).
bool tiles_permitted() {
#if defined(WASTE_X86) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int request = 0x1023; // ARCH_REQ_XCOMP_PERM
  constexpr int tile_data = 18;   // XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return permitted;
#else
  return false;
#endif
}

Isa best() {
  static const Isa found = [] {
    int isa = ISAS - 1;
    while (!usable(static_cast<Isa>(isa))) {
      --isa;
    }
    return static_cast<Isa>(isa);
  }();
  return found;
}

constexpr int NOT_FORCED = -1;
std::atomic<int> forced{NOT_FORCED};

} // namespace

bool usable(Isa isa) {
#if defined(WASTE_X86)
  __builtin_cpu_init();
  switch (isa) {
  case Isa::portable:
    return true;
  case Isa::avx2:
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  case Isa::avx512:
    return usable(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  case Isa::amx:
    return usable(Isa::avx512) && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           tiles_permitted();
  }
  return false;
#else
  return isa == Isa::portable;
#endif
}

Isa active() {
  const int isa = forced.load(std::memory_order_relaxed);
  return isa == NOT_FORCED ? best() : static_cast<Isa>(isa);
}

void force(std::optional<Isa> isa) {
  if (isa.has_value() && !usable(*isa)) {
    throw std::invalid_argument("this processor has no such instruction set");
  }
  forced.store(isa.has_value() ? static_cast<int>(*isa) : NOT_FORCED, std::memory_order_relaxed);
}

} // namespace waste
