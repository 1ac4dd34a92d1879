// Sparse core for few heads: the query as the tensor cores read it, in registers.
#pragma once

#include <cuda_bf16.h>

#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"

namespace dsacore::cuda {

inline constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

/// The query as operand A: of sixteen heads r and r + 8 (r = lane / 4), of one group of 128 latents and 16 elements of
/// pe. The 16 elements of a k-step are permuted, so that a lane's four consecutive bytes of a key are its part of
/// operand B.
template <KvFormat Format>
struct QueryFragments {
  uint32_t latent[kGroupLatents / 16][4];
  uint32_t pe[4];
  float unit[2];  ///< of the heads' FP16 values, for a BF16 query; a power of two

  /// From the first of these heads in shared memory, of which there are `heads`; others read the last one.
  __device__ __forceinline__ void load(const std::byte* query, int heads, int group, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::byte* head = query + (min(lane / 4 + 8 * i, heads - 1) * FewHeadsFormat<Format>::kQueryPitch);
      if constexpr (FewHeadsFormat<Format>::kPlainPe) {
        load_bf16(reinterpret_cast<const BFloat16*>(head) + 4 * (lane % 4), group, i);
      } else {
        load_e4m3(reinterpret_cast<const uint8_t*>(head) + 4 * (lane % 4), group, i);
      }
    }
  }

  /// To FP16, and zeros for heads that there are not.
  __device__ __forceinline__ void convert(int heads, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unit[i] = 1;
      if constexpr (FewHeadsFormat<Format>::kPlainPe) {
        to_half(i);
      } else {
        widen(i);
      }
      if (lane / 4 + 8 * i < heads) continue;
#pragma unroll
      for (auto& step : latent) step[i] = step[i + 2] = 0;
      pe[i] = pe[i + 2] = 0;
    }
  }

 private:
  /// `query` begins with the lane's four elements of a k-step; those of pe stay in their order.
  __device__ __forceinline__ void load_bf16(const BFloat16* query, int group, int i) {
#pragma unroll
    for (int step = 0; step < kGroupLatents / 16; ++step) {
      const uint2 four = *reinterpret_cast<const uint2*>(query + group * kGroupLatents + 16 * step);
      latent[step][i] = four.x;
      latent[step][i + 2] = four.y;
    }
    const BFloat16* two = query - 2 * (threadIdx.x % 4) + kLatent + group * 16;
    pe[i] = *reinterpret_cast<const uint32_t*>(two);
    pe[i + 2] = *reinterpret_cast<const uint32_t*>(two + 8);
  }
  __device__ __forceinline__ void load_e4m3(const uint8_t* query, int group, int i) {
    if constexpr (FewHeadsFormat<Format>::kWidened) {
      load_blocks(query + 12 * (threadIdx.x % 4) + group * kGroupLatents, i);
    } else {
#pragma unroll
      for (int step = 0; step < kGroupLatents / 16; ++step) {
        latent[step][i] = *reinterpret_cast<const uint32_t*>(query + group * kGroupLatents + 16 * step);
      }
    }
    pe[i] = *reinterpret_cast<const uint32_t*>(query + kLatent + group * 16);
  }

  /// In the order of LaneCodes::widen: of each 64 latents a block of 16, its even ones for two k-steps, then its odd
  /// ones.
  __device__ __forceinline__ void load_blocks(const uint8_t* query, int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 block = *reinterpret_cast<const uint4*>(query + 64 * half);
      latent[4 * half][i] = permute_bytes(block.x, block.y, 0x6420);
      latent[4 * half + 1][i] = permute_bytes(block.z, block.w, 0x6420);
      latent[4 * half + 2][i] = permute_bytes(block.x, block.y, 0x7531);
      latent[4 * half + 3][i] = permute_bytes(block.z, block.w, 0x7531);
    }
  }

  /// e4m3 to FP16.
  __device__ __forceinline__ void widen(int i) {
    const auto widen_four = [i](uint32_t(&step)[4]) {
      step[i + 2] = high_e4m3_to_f16(step[i]);
      step[i] = low_e4m3_to_f16(step[i]);
    };
#pragma unroll
    for (auto& step : latent) widen_four(step);
    widen_four(pe);
  }

  /// BF16 to FP16, the head's largest magnitude in this group moved to 2^12..2^13.
  __device__ __forceinline__ void to_half(int i) {
    __nv_bfloat162 most = __habs2(bf16_pair(latent[0][i]));
#pragma unroll
    for (auto& step : latent)
      most = __hmax2(__hmax2(most, __habs2(bf16_pair(step[i]))), __habs2(bf16_pair(step[i + 2])));
    most = __hmax2(most, __shfl_xor_sync(kWholeWarp, most, 1));
    most = __hmax2(most, __shfl_xor_sync(kWholeWarp, most, 2));
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(&most);
    const int exponent = int(max(bits & 0x7FFFu, bits >> 16 & 0x7FFFu) >> 7);
    const int field = min(2 * 127 + 12 - exponent, 253);
    const float factor = power_of_two(field);
    unit[i] = power_of_two(2 * 127 - field);
#pragma unroll
    for (auto& step : latent) {
#pragma unroll
      for (int j = i; j < 4; j += 2) {
        const float even = float_of(step[j] << 16), odd = float_of(step[j] & 0xFFFF0000u);
        step[j] = to_f16(even * factor, odd * factor);
      }
    }
  }
  __device__ __forceinline__ static __nv_bfloat162 bf16_pair(uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  }
};

}  // namespace dsacore::cuda
