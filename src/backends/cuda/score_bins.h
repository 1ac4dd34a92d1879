// The histogram of ordered score keys (format/score_key.h) that the score kernel keeps for the selection: a monotone
// map from keys to bins, so that every key of a higher bin is larger. NaN has a bin of its own and so has zero, which
// many tokens score exactly; scores of either sign have 32 bins an octave from 2^-20 to 2^12 and share the outermost
// bins beyond. Where the bins lie decides how much work the selection has, never what it selects.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"

namespace dsacore::cuda {

inline constexpr int kScoreBins = 2048;

/// What tells the bins of a sign apart: the top bits of the magnitude, counted from 2^-20.
struct ScoreBin {
  static constexpr int kShift = 18;  ///< 5 mantissa bits stay
  static constexpr int32_t kFirst = (127 - 20) << (23 - kShift);
  static constexpr int kZero = kScoreBins / 2;
  static constexpr int kLast = kZero - 1;  ///< outermost bin of a sign, counted from zero
};

DSACORE_HD constexpr int bin_of_key(uint32_t key) {
  if (key == 0) return 0;  // NaN
  const bool positive = key >= 0x80000000u;
  const uint32_t magnitude = (positive ? key : ~key) & 0x7FFFFFFFu;
  int32_t step = int32_t(magnitude >> ScoreBin::kShift) - ScoreBin::kFirst + 1;
  step = step < 1 ? 1 : step > ScoreBin::kLast ? ScoreBin::kLast : step;
  if (key == 0x80000000u) step = 0;
  return positive ? ScoreBin::kZero + step : ScoreBin::kZero - step;
}

/// The smallest key of a bin; of `kScoreBins`: above every key.
DSACORE_HD constexpr uint32_t first_key_of_bin(int bin) {
  if (bin <= 1) return uint32_t(bin);
  if (bin >= kScoreBins) return 0xFFFFFFFFu;
  const int step = bin > ScoreBin::kZero ? bin - ScoreBin::kZero : ScoreBin::kZero - bin;
  if (step == 0) return 0x80000000u;
  if (bin < ScoreBin::kZero) return 0x80000000u - (uint32_t(ScoreBin::kFirst + step) << ScoreBin::kShift);
  return step == 1 ? 0x80000001u : 0x80000000u + (uint32_t(ScoreBin::kFirst + step - 1) << ScoreBin::kShift);
}

}  // namespace dsacore::cuda
