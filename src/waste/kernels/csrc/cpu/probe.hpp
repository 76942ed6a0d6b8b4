// How fast this machine reads memory: the yardstick beside the speed of kernels that stream weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace waste {

struct Reading {
  std::uint64_t sum; // of all 64-bit words, modulo 2^64: proof that everything was read
  double seconds;    // CPU time of the calling thread (wall time where the system does not count that)
};

// Reads nbytes (a multiple of 64) `passes` times over with the widest loads this processor has. `ahead`: bytes by
// which software prefetches run in front; 0: none, which is faster for what lies in the caches next to the core.
Reading read_stream(const std::uint8_t *data, std::size_t nbytes, std::size_t passes, std::size_t ahead);

} // namespace waste
