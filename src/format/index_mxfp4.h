// Index cache page `mxfp4` (spec 6): 64 tokens of 128 e2m1, then 64 times four ue8m0 scales, one per 32 values.
#pragma once

#include <cstddef>

#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore {

struct IndexMxfp4 {
  static constexpr int kBlock = 32;
  static constexpr int kBlocks = kIndexDim / kBlock;
  static constexpr int kValueBytes = kIndexDim / 2;  ///< of one token
  static constexpr int kScaleBytes = kBlocks;        ///< of one token
  static constexpr int kRowBytes = kValueBytes + kScaleBytes;
  static constexpr int kScalesAt = kIndexPage * kValueBytes;  ///< in a page
  static constexpr int kPageBytes = kIndexPage * kRowBytes;
  static_assert(kRowBytes == 68);

  DSACORE_HD static constexpr int value_at(int token) { return token * kValueBytes; }
  DSACORE_HD static constexpr int scale_at(int token) { return kScalesAt + token * kScaleBytes; }
  /// Scale byte of a block whose largest magnitude is `amax`.
  DSACORE_HD static constexpr uint8_t scale_code_of(float amax) {
    return ue8m0_ceil((amax > 1e-4f ? amax : 1e-4f) / 6.0f);
  }

  /// Writes a key [128] (BF16 values) as token `token` (0..63) of a page.
  static void encode(const float* key, int token, std::byte* page) {
    for (int block = 0; block < kBlocks; ++block) {
      const float* x = key + block * kBlock;
      float amax = 0;
      for (int i = 0; i < kBlock; ++i) amax = magnitude(x[i]) > amax ? magnitude(x[i]) : amax;
      const uint8_t code = scale_code_of(amax);
      const float scale = ue8m0_to_float(code);
      for (int i = 0; i < kBlock; i += 2) {
        const uint8_t even = to_e2m1(x[i] / scale);
        const uint8_t odd = to_e2m1(x[i + 1] / scale);
        page[value_at(token) + (block * kBlock + i) / 2] = std::byte(even | odd << 4);
      }
      page[scale_at(token) + block] = std::byte(code);
    }
  }

  static float scale(const std::byte* page, int token, int block) {
    return ue8m0_to_float(uint8_t(page[scale_at(token) + block]));
  }
  /// Value `i` of 128 without its scale.
  static float value(const std::byte* page, int token, int i) {
    const uint8_t pair = uint8_t(page[value_at(token) + i / 2]);
    return e2m1_to_float(i % 2 == 0 ? pair & 15 : pair >> 4);
  }
};

}  // namespace dsacore
