// Sparse core for few heads: rows of `nvfp4_ds_mla` to FP16, in the order in which the logits multiply them.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"

namespace dsacore::cuda {

/// What a lane has of `Eights` times eight keys, of key lane / 4 of each, and of one group of latents: of each 64 the
/// block of 16 whose number is lane % 4, and four of 16 elements of pe.
template <int Eights>
struct LaneCodes {
  using F = FewHeadsFormat<KvFormat::kNvfp4DsMla>;

  uint2 codes[Eights][2];   ///< e2m1, of the blocks of both 64
  uint16_t scales[Eights];  ///< e4m3, of both blocks
  uint32_t pe[Eights];      ///< e4m3

  /// From the row of the lane's first key.
  __device__ __forceinline__ LaneCodes(const std::byte* row, int group, int lane) {
#pragma unroll
    for (int eight = 0; eight < Eights; ++eight, row += 8 * F::kPitch) {
      const std::byte* values = row + KvNvfp4DsMla::kValuesAt + group * (kGroupLatents / 2) + lane % 4 * 8;
      codes[eight][0] = *reinterpret_cast<const uint2*>(values);
      codes[eight][1] = *reinterpret_cast<const uint2*>(values + 32);
      scales[eight] = *reinterpret_cast<const uint16_t*>(row + KvNvfp4DsMla::scale_at(lane % 4) + group * 2);
      pe[eight] = *reinterpret_cast<const uint32_t*>(row + F::kPeAt + group * 16 + lane % 4 * 4);
    }
  }

  /// The even or the odd values of a block times its scale. By way of e4m3 codes of 2^-6 times the values and FP16
  /// scales of 2^6 times theirs; exact.
  __device__ __forceinline__ void widen(int eight, int block, int odd, uint32_t (&wide)[4]) const {
    constexpr uint32_t kWidening = 0x54005400;  // 2^6, twice
    const uint32_t scale =
        permute_bytes(multiply_f16(low_e4m3_to_f16(scales[eight]), kWidening), 0, block == 0 ? 0x1010 : 0x3232);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t x = i == 0 ? codes[eight][block].x : codes[eight][block].y;
      const uint32_t four =
          odd == 0 ? (x << 2 & 0x1C1C1C1Cu) | (x << 4 & 0x80808080u) : (x >> 2 & 0x1C1C1C1Cu) | (x & 0x80808080u);
      wide[2 * i] = multiply_f16(low_e4m3_to_f16(four), scale);
      wide[2 * i + 1] = multiply_f16(high_e4m3_to_f16(four), scale);
    }
  }
};

}  // namespace dsacore::cuda
