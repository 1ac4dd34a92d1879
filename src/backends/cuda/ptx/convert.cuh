// Conversions of pairs and eights between BF16, e4m3 and FP32; powers of two.
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

/// Two FP32 values as e4m3, saturated, to nearest even, `low` in the low byte; the bits of format/numeric.h's to_e4m3.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
/// Eight BF16 values times `scale`, as e4m3.
__device__ __forceinline__ uint2 scaled_e4m3(const uint4& values, float scale) {
  const auto pair = [scale](uint32_t v) { return pack_e4m3(low_bf16(v) * scale, high_bf16(v) * scale); };
  return {pair(values.x) | pair(values.y) << 16, pair(values.z) | pair(values.w) << 16};
}

/// 2^(field - 127) for a biased exponent of 1..254.
__device__ __forceinline__ float power_of_two(int field) { return __uint_as_float(uint32_t(field) << 23); }
/// x of such a power.
__device__ __forceinline__ float exponent_of(float power) { return float(int(__float_as_uint(power) >> 23) - 127); }
/// 2^x to an FP32 unit or two; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace dsacore::cuda
