// The histogram of ordered score keys (format/score_key.h) that the score kernel keeps for the selection: a monotone
// map from keys to bins, so that every key of a higher bin is larger. Zero, which many tokens score exactly, has a bin
// of its own. The others have 64 bins an octave: positive scores, among which the selection most often ends, from 2^-12
// to 2^10, negative ones from 2^-6 to nearly 2^4; what lies beyond, and NaN, shares the outermost bins. Where the bins
// lie decides how much work the selection has, never what it selects.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"

namespace dsacore::cuda {

inline constexpr int kScoreBins = 2048;
inline constexpr int kZeroBin = 639;
inline constexpr int kBinShift = 17;  ///< of a magnitude: bits that do not tell bins apart
/// Magnitudes, without those bits, at which the bins above and below zero begin.
inline constexpr int32_t kFirstPositive = (127 - 12) << (23 - kBinShift);
inline constexpr int32_t kFirstNegative = (127 - 6) << (23 - kBinShift);

DSACORE_HD constexpr int bin_of_key(uint32_t key) {
  const bool positive = key >= 0x80000000u;
  const int32_t magnitude = int32_t(((positive ? key : ~key) & 0x7FFFFFFFu) >> kBinShift);
  // Without branches, which lanes with scores of both signs would take one after the other.
  const int32_t bin = positive ? kZeroBin + 1 - kFirstPositive + magnitude : kZeroBin - 1 + kFirstNegative - magnitude;
  const int32_t low = positive ? kZeroBin + 1 : 0, high = positive ? kScoreBins - 1 : kZeroBin - 1;
  const int32_t inside = bin < low ? low : bin > high ? high : bin;
  return key == 0x80000000u ? kZeroBin : inside;
}

/// The smallest key of a bin; of `kScoreBins`: above every key.
DSACORE_HD constexpr uint32_t first_key_of_bin(int bin) {
  if (bin <= 0) return 0;
  if (bin >= kScoreBins) return 0xFFFFFFFFu;
  if (bin == kZeroBin) return 0x80000000u;
  if (bin < kZeroBin) return 0x80000000u - (uint32_t(kFirstNegative + kZeroBin - bin) << kBinShift);
  if (bin == kZeroBin + 1) return 0x80000001u;
  return 0x80000000u + (uint32_t(kFirstPositive + bin - kZeroBin - 1) << kBinShift);
}

}  // namespace dsacore::cuda
