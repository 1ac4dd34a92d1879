// Index cache page `fp8` (spec 6): 64 tokens of 128 e4m3, then 64 power-of-two FP32 scales.
#pragma once

#include <cstddef>
#include <cstring>

#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore {

struct IndexFp8 {
  static constexpr int kValueBytes = kIndexDim;           ///< of one token
  static constexpr int kScaleBytes = int(sizeof(float));  ///< of one token
  static constexpr int kRowBytes = kValueBytes + kScaleBytes;
  static constexpr int kScalesAt = kIndexPage * kValueBytes;  ///< in a page
  static constexpr int kPageBytes = kIndexPage * kRowBytes;
  static_assert(kRowBytes == 132);

  DSACORE_HD static constexpr int value_at(int token) { return token * kValueBytes; }
  DSACORE_HD static constexpr int scale_at(int token) { return kScalesAt + token * kScaleBytes; }
  /// Scale of a key whose largest magnitude is `amax`, as ue8m0.
  DSACORE_HD static constexpr uint8_t scale_code_of(float amax) {
    return ue8m0_ceil((amax > 1e-4f ? amax : 1e-4f) / kE4m3Max);
  }

  /// Writes a key [128] (BF16 values) as token `token` (0..63) of a page.
  static void encode(const float* key, int token, std::byte* page) {
    float amax = 0;
    for (int i = 0; i < kIndexDim; ++i) amax = magnitude(key[i]) > amax ? magnitude(key[i]) : amax;
    const float scale = ue8m0_to_float(scale_code_of(amax));
    for (int i = 0; i < kIndexDim; ++i) page[value_at(token) + i] = std::byte(to_e4m3(key[i] / scale));
    std::memcpy(page + scale_at(token), &scale, sizeof(float));
  }

  static float scale(const std::byte* page, int token) {
    float s;
    std::memcpy(&s, page + scale_at(token), sizeof(float));
    return s;
  }
  /// Value `i` of 128 without its scale.
  static float value(const std::byte* page, int token, int i) {
    return e4m3_to_float(uint8_t(page[value_at(token) + i]));
  }
};

}  // namespace dsacore
