// A mix of 64 bits, of which random numbers and what is drawn by a place are made.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"

namespace dsacore {

/// The finaliser of splitmix64: neighbouring values have nothing in common after it.
DSACORE_HD constexpr uint64_t mixed_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace dsacore
