// Conversions of pairs and eights between BF16 and FP32.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// Two FP32 values as BF16, to nearest even, `low` in the low half. A NaN gives 0x7FFF.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

}  // namespace dsacore::cuda
