// Products of e2m1 values and e4m3 scales: what a block of an `nvfp4_ds_mla` row is looked up in.
#pragma once

#include <cstdint>

#include "format/numeric.h"

namespace dsacore::cpu {

/// For each scale code the BF16 products with the 16 e2m1 codes, all exact: first their 16 low bytes, then their 16
/// high bytes, which are two byte shuffles.
struct Nvfp4Products {
  alignas(64) uint8_t bytes[256][32];
};

constexpr Nvfp4Products make_nvfp4_products() {
  Nvfp4Products products{};
  for (int scale = 0; scale < 256; ++scale) {
    const bool nan = (scale & 0x7F) == kE4m3Nan;
    for (int code = 0; code < 16; ++code) {
      const uint16_t bits =
          nan ? uint16_t(0x7FC0) : to_bf16(e2m1_to_float(uint8_t(code)) * e4m3_to_float(uint8_t(scale))).bits;
      products.bytes[scale][code] = uint8_t(bits & 0xFF);
      products.bytes[scale][16 + code] = uint8_t(bits >> 8);
    }
  }
  return products;
}

}  // namespace dsacore::cpu
