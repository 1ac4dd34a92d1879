// Sparse core for few heads: what the producers make of rows of `nvfp4_ds_mla`.
#pragma once

#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"

namespace dsacore::cuda {

/// Widens a producer warp's rows of a raw `nvfp4_ds_mla` tile: e2m1 codes become e4m3 codes of 2^-6 times the value,
/// and e4m3 scales FP16 numbers of 2^6 times theirs; both exact.
template <int Keys>
__device__ __forceinline__ void widen_rows(const std::byte* raw, ExpandedTile<Keys>& out, int warp, int lane) {
  using Format = FewHeadsFormat<KvFormat::kNvfp4DsMla>;
  constexpr int kRows = Keys / kProducerWarps;
  static_assert(kLatent == 16 * 32 && kRows % 8 == 0);
#pragma unroll 4
  for (int i = 0; i < kRows; ++i) {
    const int key = warp * kRows + i;
    const uint2 codes =
        *reinterpret_cast<const uint2*>(raw + key * Format::kPitch + KvNvfp4DsMla::kValuesAt + lane * 8);
    uint32_t wide[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t x = j == 0 ? codes.x : codes.y;
      const uint32_t even = (x << 2 & 0x1C1C1C1Cu) | (x << 4 & 0x80808080u);
      const uint32_t odd = (x >> 2 & 0x1C1C1C1Cu) | (x & 0x80808080u);
      wide[2 * j] = permute_bytes(even, odd, 0x5140);
      wide[2 * j + 1] = permute_bytes(even, odd, 0x7362);
    }
    *reinterpret_cast<uint4*>(out.operands + key * Format::kOperandPitch + lane * 16) =
        make_uint4(wide[0], wide[1], wide[2], wide[3]);
  }
#pragma unroll 1
  for (int i = 0; i < kRows; i += 8) {
    const int key = warp * kRows + i + lane / 4, part = lane % 4;
    *reinterpret_cast<uint4*>(out.operands + key * Format::kOperandPitch + Format::kPeAt + part * 16) =
        *reinterpret_cast<const uint4*>(raw + key * Format::kPitch + KvNvfp4DsMla::kPeAt + part * 16);
    // Eight neighbouring scales are those of blocks part, part + 4, and so on (KvNvfp4DsMla::scale_at).
    const uint2 scales = *reinterpret_cast<const uint2*>(raw + key * Format::kPitch + KvNvfp4DsMla::scale_at(part));
    constexpr uint32_t kWidening = 0x54005400;  // 2^6, twice
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t four = k < 2 ? scales.x : scales.y;
      const uint32_t pair = multiply_f16(k % 2 == 0 ? low_e4m3_to_f16(four) : high_e4m3_to_f16(four), kWidening);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int block = part + 4 * (2 * k + j);
        const auto scale = uint16_t(pair >> 16 * j);
        out.by_key[key][block] = scale;
        out.by_block[block][key] = scale;
      }
    }
  }
}

}  // namespace dsacore::cuda
