// Scores as integers whose order is the order of spec 5, step 10: larger is better, NaN below everything, -0 equals +0.
#pragma once

#include <cstdint>

#include "format/numeric.h"

namespace dsacore {

inline constexpr uint32_t kNanScoreKey = 0;

/// Ordered key of a score. +infinity gives 0xFF800000, so no key is 0xFFFFFFFF.
DSACORE_HD constexpr uint32_t score_key(float score) {
  const uint32_t bits = bits_of(score + 0.0f);  // -0 becomes +0
  const uint32_t sign = uint32_t(int32_t(bits) >> 31);
  return is_nan(score) ? kNanScoreKey : bits ^ (sign | 0x80000000u);
}

}  // namespace dsacore
