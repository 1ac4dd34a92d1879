// MLA cache row `fp8` (spec 6): 576 e4m3 with one scale for the layer, which the row does not hold.
#pragma once

#include <cstddef>

#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore {

struct KvFp8 {
  static constexpr int kValuesAt = 0;
  static constexpr int kPeAt = kValuesAt + kLatent;
  static constexpr int kRowBytes = kPeAt + kPe;
  static_assert(kRowBytes == 576);

  /// Packs one row from a latent `c` [512] (BF16 values) and pe [64].
  static void encode(const float* c, const BFloat16* pe, float k_scale_inv, std::byte* row) {
    for (int i = 0; i < kLatent; ++i) row[kValuesAt + i] = std::byte(to_e4m3(c[i] * k_scale_inv));
    for (int i = 0; i < kPe; ++i) row[kPeAt + i] = std::byte(to_e4m3(to_float(pe[i]) * k_scale_inv));
  }

  /// Value `i` of 576 without the layer's `k_scale`.
  static float value(const std::byte* row, int i) { return e4m3_to_float(uint8_t(row[i])); }
};

}  // namespace dsacore
