// The histogram of ordered score keys (format/score_key.h) that the score kernel keeps for the selection: a monotone
// map from keys to bins, so that every key of a higher bin is larger. NaN has a bin of its own and so has zero, which
// many tokens score exactly. Positive scores, among which the selection most often ends, have 64 bins an octave from
// 2^-12 to 2^10, negative ones 32 from 2^-10 to nearly 2^10; what lies beyond shares the outermost bins. Where the bins
// lie decides how much work the selection has, never what it selects.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"

namespace dsacore::cuda {

inline constexpr int kScoreBins = 2048;

/// The bins of one sign, told apart by the top bits of the magnitude.
struct SignBins {
  int shift;      ///< bits that do not tell
  int32_t first;  ///< magnitude of the first bin above zero, without them
  int count;
};

constexpr int kZeroBin = 639;
constexpr SignBins kPositiveBins{17, (127 - 12) << (23 - 17), kScoreBins - 1 - kZeroBin};
constexpr SignBins kNegativeBins{18, (127 - 10) << (23 - 18), kZeroBin - 1};

DSACORE_HD constexpr int bin_of_key(uint32_t key) {
  if (key == 0) return 0;  // NaN
  const bool positive = key >= 0x80000000u;
  const SignBins bins = positive ? kPositiveBins : kNegativeBins;
  const uint32_t magnitude = (positive ? key : ~key) & 0x7FFFFFFFu;
  int32_t step = int32_t(magnitude >> bins.shift) - bins.first + 1;
  step = step < 1 ? 1 : step > bins.count ? bins.count : step;
  if (key == 0x80000000u) step = 0;
  return positive ? kZeroBin + step : kZeroBin - step;
}

/// The smallest key of a bin; of `kScoreBins`: above every key.
DSACORE_HD constexpr uint32_t first_key_of_bin(int bin) {
  if (bin <= 1) return uint32_t(bin);
  if (bin >= kScoreBins) return 0xFFFFFFFFu;
  if (bin == kZeroBin) return 0x80000000u;
  const SignBins bins = bin > kZeroBin ? kPositiveBins : kNegativeBins;
  const int step = bin > kZeroBin ? bin - kZeroBin : kZeroBin - bin;
  if (bin < kZeroBin) return 0x80000000u - (uint32_t(bins.first + step) << bins.shift);
  return step == 1 ? 0x80000001u : 0x80000000u + (uint32_t(bins.first + step - 1) << bins.shift);
}

}  // namespace dsacore::cuda
