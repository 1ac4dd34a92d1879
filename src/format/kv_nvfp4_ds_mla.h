// MLA cache row `nvfp4_ds_mla` (spec 6): 512 e2m1 in blocks of 16 with an e4m3 scale each, pe in e4m3 without a scale.
#pragma once

#include <cstddef>

#include "dsacore/problem.h"
#include "format/numeric.h"

namespace dsacore {

struct KvNvfp4DsMla {
  static constexpr int kBlock = 16;
  static constexpr int kBlocks = kLatent / kBlock;
  static constexpr int kValuesAt = 0;
  static constexpr int kPeAt = kValuesAt + kLatent / 2;
  static constexpr int kScalesAt = kPeAt + kPe;
  static constexpr int kRowBytes = kScalesAt + kBlocks;
  static_assert(kRowBytes == 352);

  /// Byte of the scale of block `s`: the order in which four lanes of a tensor core read them.
  DSACORE_HD static constexpr int scale_at(int s) { return kScalesAt + 8 * (s & 3) + (s >> 2); }

  /// e4m3 code of the scale of a block whose largest magnitude is `amax`.
  DSACORE_HD static constexpr uint8_t scale_code_for(float amax) {
    const float wanted = amax / 6.0f;
    return to_e4m3(wanted > 0x1p-9f ? wanted : 0x1p-9f);
  }

  /// Packs one row from a latent `c` [512] (BF16 values) and pe [64].
  static void encode(const float* c, const BFloat16* pe, std::byte* row) {
    for (int block = 0; block < kBlocks; ++block) {
      const float* x = c + block * kBlock;
      float amax = 0;
      for (int i = 0; i < kBlock; ++i) amax = magnitude(x[i]) > amax ? magnitude(x[i]) : amax;
      const uint8_t code = scale_code_for(amax);
      const float scale = e4m3_to_float(code);
      for (int i = 0; i < kBlock; i += 2) {
        const uint8_t even = to_e2m1(x[i] / scale);
        const uint8_t odd = to_e2m1(x[i + 1] / scale);
        row[kValuesAt + (block * kBlock + i) / 2] = std::byte(even | odd << 4);
      }
      row[scale_at(block)] = std::byte(code);
    }
    for (int i = 0; i < kPe; ++i) row[kPeAt + i] = std::byte(to_e4m3(to_float(pe[i])));
  }

  /// Value `i` of 576, dequantized: latent, then pe.
  static float value(const std::byte* row, int i) {
    if (i >= kLatent) return e4m3_to_float(uint8_t(row[kPeAt + i - kLatent]));
    const uint8_t pair = uint8_t(row[kValuesAt + i / 2]);
    return e2m1_to_float(i % 2 == 0 ? pair & 15 : pair >> 4) * e4m3_to_float(uint8_t(row[scale_at(i / kBlock)]));
  }
};

}  // namespace dsacore
