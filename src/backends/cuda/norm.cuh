// The RMS norm of steps 1 and 5 (spec 4) with one order of sums, whichever kernel runs it on however many threads:
// every kernel that normalises a row gets the same bits.
//
//   - v_i: the squares of values 8 i .. 8 i + 7 of a block of 128, added in ascending order (a square of a BF16 is
//   exact)
//   - c_q = (v_q + v_{q+4}) + (v_{q+8} + v_{q+12}), q = 0..3
//   - the block's sum: (c_0 + c_1) + (c_2 + c_3); the row's: its blocks from left to right
//   - factor = 1 / sqrt(sum / n + eps), every step rounded to nearest
//   - out = (x * factor) * weight, two FP32 products, then BF16
#pragma once

#include "backends/cuda/ptx/convert.cuh"
#include "dsacore/formats.h"

namespace dsacore::cuda {

inline constexpr int kNormBlock = 128;  ///< values of a block; rows are whole blocks

/// Eight BF16 values from memory that an earlier kernel wrote; by one load from L2 where the address is a multiple
/// of 16. A kernel that has not waited yet needs that one: it cannot tell what L1 has.
__device__ __forceinline__ uint4 load_bf16x8(const BFloat16* from, bool aligned16) {
  if (aligned16) return __ldcg(reinterpret_cast<const uint4*>(from));
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = uint32_t(from[2 * i].bits) | uint32_t(from[2 * i + 1].bits) << 16;
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/// v of eight values.
__device__ __forceinline__ float sum_of_squares(const uint4& values) {
  float sum = low_bf16(values.x) * low_bf16(values.x);
  sum = fmaf(high_bf16(values.x), high_bf16(values.x), sum);
  sum = fmaf(low_bf16(values.y), low_bf16(values.y), sum);
  sum = fmaf(high_bf16(values.y), high_bf16(values.y), sum);
  sum = fmaf(low_bf16(values.z), low_bf16(values.z), sum);
  sum = fmaf(high_bf16(values.z), high_bf16(values.z), sum);
  sum = fmaf(low_bf16(values.w), low_bf16(values.w), sum);
  return fmaf(high_bf16(values.w), high_bf16(values.w), sum);
}

/// The block's sum from v_i in lane i of 16 (each half of the warp has a block of its own); every lane gets it.
__device__ __forceinline__ float block_sum(float v) {
  v += __shfl_xor_sync(0xFFFFFFFF, v, 4);
  v += __shfl_xor_sync(0xFFFFFFFF, v, 8);
  v += __shfl_xor_sync(0xFFFFFFFF, v, 1);
  return v + __shfl_xor_sync(0xFFFFFFFF, v, 2);
}

/// The row's factor from the sum of its blocks from left to right.
__device__ __forceinline__ float norm_factor(float sum, int blocks, float eps) {
  const float mean = __fdiv_rn(sum, float(blocks * kNormBlock));
  return __frcp_rn(__fsqrt_rn(mean + eps));
}
/// From shared memory, at a multiple of 16 bytes and with room for `Most` blocks: read at once, not one by one.
template <int Most>
__device__ __forceinline__ float norm_factor(const float* block_sums, int blocks, float eps) {
  static_assert(Most % 4 == 0);
  float4 four[Most / 4];
#pragma unroll
  for (int i = 0; i < Most / 4; ++i) four[i] = reinterpret_cast<const float4*>(block_sums)[i];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Most / 4; ++i) {
    if (4 * i < blocks) sum += four[i].x;
    if (4 * i + 1 < blocks) sum += four[i].y;
    if (4 * i + 2 < blocks) sum += four[i].z;
    if (4 * i + 3 < blocks) sum += four[i].w;
  }
  return norm_factor(sum, blocks, eps);
}

/// Eight values of the result.
__device__ __forceinline__ uint4 normalised(const uint4& x, float factor, const uint4& weight) {
  const auto pair = [factor](uint32_t values, uint32_t weights) {
    return pack_bf16(low_bf16(values) * factor * low_bf16(weights), high_bf16(values) * factor * high_bf16(weights));
  };
  return {pair(x.x, weight.x), pair(x.y, weight.y), pair(x.z, weight.z), pair(x.w, weight.w)};
}

}  // namespace dsacore::cuda
