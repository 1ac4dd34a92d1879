// MLA cache row `fp8_ds_mla` (spec 6): 512 e4m3 in tiles of 128 with a power-of-two FP32 scale each, pe in BF16.
#pragma once

#include <cstddef>
#include <cstring>

#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore {

struct KvFp8DsMla {
  static constexpr int kTile = 128;
  static constexpr int kTiles = kLatent / kTile;
  static constexpr int kValuesAt = 0;
  static constexpr int kScalesAt = kValuesAt + kLatent;
  static constexpr int kPeAt = kScalesAt + kTiles * int(sizeof(float));
  static constexpr int kRowBytes = kPeAt + kPe * int(sizeof(BFloat16));
  static_assert(kRowBytes == 656);

  /// Scale of a tile whose largest magnitude is `amax`: a power of two, so that `c / scale` is exact.
  DSACORE_HD static constexpr float scale_for(float amax) {
    const float wanted = amax / kE4m3Max;
    return ue8m0_to_float(ue8m0_ceil(wanted > 1e-4f ? wanted : 1e-4f));
  }

  /// Packs one row from a latent `c` [512] (BF16 values) and pe [64].
  static void encode(const float* c, const BFloat16* pe, std::byte* row) {
    for (int tile = 0; tile < kTiles; ++tile) {
      float amax = 0;
      for (int i = 0; i < kTile; ++i)
        amax = magnitude(c[tile * kTile + i]) > amax ? magnitude(c[tile * kTile + i]) : amax;
      const float scale = scale_for(amax);
      for (int i = 0; i < kTile; ++i)
        row[kValuesAt + tile * kTile + i] = std::byte(to_e4m3(c[tile * kTile + i] / scale));
      std::memcpy(row + kScalesAt + tile * sizeof(float), &scale, sizeof(float));
    }
    std::memcpy(row + kPeAt, pe, kPe * sizeof(BFloat16));
  }

  static float scale(const std::byte* row, int tile) {
    float s;
    std::memcpy(&s, row + kScalesAt + tile * sizeof(float), sizeof(float));
    return s;
  }

  /// Value `i` of 576, dequantized: latent, then pe.
  static float value(const std::byte* row, int i) {
    if (i < kLatent) return e4m3_to_float(uint8_t(row[kValuesAt + i])) * scale(row, i / kTile);
    BFloat16 pe;
    std::memcpy(&pe, row + kPeAt + (i - kLatent) * sizeof(BFloat16), sizeof(BFloat16));
    return to_float(pe);
  }
};

}  // namespace dsacore
