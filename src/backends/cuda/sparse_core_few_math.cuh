// Sparse core for few heads: what a math warp does with a tile of keys. Products are mma.sync in FP16 with FP32 sums;
// e4m3 and e2m1 codes, and the products of the latter with their block scales, are exact in FP16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/half_warp.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"

namespace dsacore::cuda {

inline constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

/// 2^(field - 127) for a biased exponent of 1..254.
__device__ __forceinline__ float power_of_two(int field) { return float_of(uint32_t(field) << 23); }
__device__ __forceinline__ uint32_t half2_bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ __forceinline__ __half2 half2_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, __half2 b) {
  return half2_bits(__hmul2(half2_of(a), b));
}

/// All math warps meet; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void math_barrier() { barrier_meet(1, 32 * kMathWarps); }

/// p in shared memory is p * scale of the key and group * 2^14 / 2^unit, where 2^unit is the largest p * scale so far
/// of the head and group, rounded down to a power of two: FP16 holds it without overflow, and what it loses below is
/// less than 2^-38 of the largest. Fields are biased exponents, bounded so that all factors are normal numbers.
inline constexpr int kUnitHeadroom = 14;
inline constexpr int kLeastUnitField = 15, kLargestUnitField = 254;
__device__ __forceinline__ int unit_field(float largest_weight) {
  return min(max(int(bits_of(largest_weight) >> 23), kLeastUnitField), kLargestUnitField);
}
__device__ __forceinline__ float into_unit(int field) { return power_of_two(2 * 127 + kUnitHeadroom - field); }
__device__ __forceinline__ float out_of_unit(int field) { return power_of_two(field - kUnitHeadroom); }

/// The query as operand A: heads r and r + 8 (r = lane / 4) of one group of 128 latents and 16 elements of pe. The 16
/// elements of a k-step are permuted, so that a lane's four consecutive bytes of a key are its part of operand B.
template <KvFormat Format>
struct QueryFragments {
  uint32_t latent[kGroupLatents / 16][4];
  uint32_t pe[4];
  float unit[2];  ///< of the heads' FP16 values, for a BF16 query; a power of two

  /// From shared memory; heads that there are not read the last one.
  __device__ __forceinline__ void load(const std::byte* query, int heads, int group, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::byte* head = query + min(lane / 4 + 8 * i, heads - 1) * FewHeadsFormat<Format>::kQueryPitch;
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
#pragma unroll
    for (int step = 0; step < kGroupLatents / 16; ++step) {
      latent[step][i] = *reinterpret_cast<const uint32_t*>(query + group * kGroupLatents + 16 * step);
    }
    pe[i] = *reinterpret_cast<const uint32_t*>(query + kLatent + group * 16);
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
        step[j] = half2_bits(__floats2half2_rn(even * factor, odd * factor));
      }
    }
  }
  __device__ __forceinline__ static __nv_bfloat162 bf16_pair(uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  }
};

/// One math warp of eight. In the logits it has one group of latents and one half of the keys, in the softmax two
/// heads, one each half of the warp, in the latents 64 columns; 16 heads always. `AtOnce`: keys whose logits are in
/// registers together.
template <KvFormat Format, int Keys, int AtOnce>
struct MathWarp {
  using F = FewHeadsFormat<Format>;
  using Shared = FewHeadsShared<Format, Keys>;
  static constexpr int kScaleGroups = F::kScaleGroups;
  static constexpr int kWarpKeys = Keys / 2;
  static constexpr int kWarpLatents = kLatent / kMathWarps, kBlocks16 = kWarpLatents / 16;
  static constexpr int kHeads = kFewHeadsMax / kMathWarps;
  static constexpr int kLaneKeys = Keys / 16;
  static constexpr int kBlocks = (AtOnce < kWarpKeys ? AtOnce : kWarpKeys) / 8;  ///< of keys, in the logits

  Shared& shared;
  ExpandedTile<Keys>& expanded;  ///< where the format has one
  uint32_t shared_at;            ///< address of `shared`
  int warp, lane;
  float exp2_scale;  ///< of logits, to base 2

  QueryFragments<Format> query;
  /// Sums of heads r and r + 8, r = lane / 4, in their units: of 16 latents from 16 q the pairs of columns {4c, 4c + 2}
  /// at [q][0] and {4c + 1, 4c + 3} at [q][1], c = lane % 4.
  float latent[kBlocks16][2][4] = {};
  // Of the lane's head: see `head`.
  float largest = -HUGE_VALF;  ///< logit
  float sum = 0;               ///< this lane's part
  float weight = 0;            ///< the largest p * scale of group (lane / 4) % 4

  __device__ __forceinline__ MathWarp(Shared& s, uint32_t at, int warp_index, int lane_index, float scale)
      : shared(s),
        expanded(*reinterpret_cast<ExpandedTile<Keys>*>(&s + 1)),
        shared_at(at),
        warp(warp_index),
        lane(lane_index),
        exp2_scale(scale) {}

  /// Makes the compiler work addresses out again in each phase of a tile, where it would rather keep them all and
  /// spill.
  __device__ __forceinline__ void forget_addresses() { asm volatile("" : "+r"(lane), "+r"(warp)); }

  __device__ __forceinline__ int head() const { return kHeads * warp + lane / 16; }
  __device__ __forceinline__ int group() const { return warp % kKeyGroups; }

  // ---- logits ----

  /// This warp's group's part of the dot products with its half of the tile's keys; `tile` is the raw tile, `operands`
  /// the address of what is multiplied.
  __device__ __forceinline__ void logits(const std::byte* tile, uint32_t operands) {
    forget_addresses();
    const int first = warp / kKeyGroups * kWarpKeys;
#pragma unroll
    for (int keys = 0; keys < kWarpKeys; keys += 8 * kBlocks) logits_of_blocks(tile, operands, first + keys);
  }

  // ---- softmax ----

  /// p of the tile's keys, of which the first `keys` count, and what the latents so far must be multiplied with.
  __device__ __forceinline__ void softmax(int keys) {
    forget_addresses();
    const int first = kLaneKeys * (lane % 16);
    float p[kLaneKeys];
    add_groups(first, p);
    const float before = largest;
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      if (first + j >= keys) p[j] = -HUGE_VALF;
      largest = fmaxf(largest, p[j]);
    }
    largest = half_warp_max(largest);
    const float rescale = exp2_approx((before - largest) * exp2_scale);
    sum *= rescale;
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      p[j] = first + j < keys ? exp2_approx((p[j] - largest) * exp2_scale) : 0.0f;
      sum += p[j];
    }
    if constexpr (kScaleGroups > 1) {
      store_scaled(first, p, rescale);
    } else {
      store_p(0, first, p, float(1 << kUnitHeadroom));
      if (lane % 16 == 0) shared.rescale[head()][0] = rescale;
    }
  }

  // ---- latents ----

  __device__ __forceinline__ void latents(uint32_t operands) {
    forget_addresses();
    const int scale_group = kScaleGroups > 1 ? warp * kWarpLatents / kGroupLatents : 0;
    rescale_latents(scale_group);
#pragma unroll
    for (int step = 0; step < Keys / 16; ++step) {
      uint32_t p[4];
      load_matrices(p,
                    shared_at + uint32_t(offsetof(Shared, p)) +
                        uint32_t(((scale_group * kFewHeadsMax + lane % 16) * (Keys + 8) + step * 16 + lane / 16 * 8) *
                                 int(sizeof(__half))));
#pragma unroll
      for (int j = 0; j < kBlocks16 / 2; ++j) {
        uint32_t codes[4];  // of two blocks of 16 latents, each for keys 0..7 and 8..15 of the step
        load_matrices_transposed(codes, operands + (step * 16 + lane % 16) * F::kOperandPitch + warp * kWarpLatents +
                                            j * 32 + lane / 16 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply_block(latent[2 * j + i], p, codes[2 * i], codes[2 * i + 1], step, 2 * j + i);
      }
    }
  }

  // ---- the part ----

  /// Leaves the sums of all heads in memory, as split `split` of `splits`.
  __device__ __forceinline__ void leave(const Parts& parts, int64_t row, int split, int splits, int heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int latent_head = lane / 4 + 8 * i;
      if (latent_head >= heads) continue;
      float* to = parts.latents + ((row * splits + split) * heads + latent_head) * kLatent + warp * kWarpLatents;
#pragma unroll
      for (int q = 0; q < kBlocks16; ++q) {
        const auto& even = latent[q][0];
        const auto& odd = latent[q][1];
        __stcg(reinterpret_cast<float4*>(to) + 4 * q + lane % 4,
               make_float4(even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]));
      }
    }
    const float all = half_warp_sum(sum);
    if (lane % 4 == 0 && head() < heads) {
      const float unit = kScaleGroups > 1 ? out_of_unit(unit_field(weight)) : 1.0f / (1 << kUnitHeadroom);
      const int64_t list = (row * heads + head()) * kKeyGroups + lane / 4 % 4;
      __stcg(reinterpret_cast<float4*>(parts.statistics + list * splits + split), make_float4(largest, all, unit, 0));
    }
  }

 private:
  __device__ __forceinline__ void logits_of_blocks(const std::byte* tile, uint32_t operands, int first) {
    float dot[kBlocks][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) multiply_keys(dot[block], operands, first + block * 8, half);
    }
    if constexpr (F::kPlainPe) scale_latents(dot, tile, first);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) add_pe(dot[block], dot[block + 1], operands, first + block * 8);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float* row = &shared.logits[group()][lane / 4][first + block * 8 + 2 * (lane % 4)];
      *reinterpret_cast<float2*>(row) = make_float2(dot[block][0], dot[block][1]);
      *reinterpret_cast<float2*>(row + 8 * (Keys + 8)) = make_float2(dot[block][2], dot[block][3]);
    }
  }

  /// Dot products with eight keys over 64 latents.
  __device__ __forceinline__ void multiply_keys(float (&dot)[4], uint32_t operands, int key, int half) const {
    uint32_t codes[4];
    load_matrices(
        codes, operands + (key + lane % 8) * F::kOperandPitch + group() * kGroupLatents + (half * 4 + lane / 8) * 16);
    uint2 scales = {};
    if constexpr (F::kExpanded) {
      scales = *reinterpret_cast<const uint2*>(&expanded.by_key[key + lane / 4][group() * 8 + half * 4]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t low = low_e4m3_to_f16(codes[i]), high = high_e4m3_to_f16(codes[i]);
      if constexpr (F::kExpanded) {
        const __half2 pair = half2_of(i < 2 ? scales.x : scales.y);
        const __half2 scale = i % 2 == 0 ? __low2half2(pair) : __high2half2(pair);
        low = multiply_half2(low, scale);
        high = multiply_half2(high, scale);
      }
      mma_f16(dot, query.latent[half * 4 + i], low, high);
    }
  }

  /// Dot products of FP16 queries with codes, times the scales of key and query.
  __device__ __forceinline__ void scale_latents(float (&dot)[kBlocks][4], const std::byte* tile, int first) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int key = first + block * 8 + 2 * (lane % 4);
      const std::byte* scale = tile + key * F::kPitch + KvFp8DsMla::kScalesAt + group() * int(sizeof(float));
      const float even = *reinterpret_cast<const float*>(scale),
                  odd = *reinterpret_cast<const float*>(scale + F::kPitch);
      if (lane < 4) *reinterpret_cast<float2*>(&shared.scales[group()][key]) = make_float2(even, odd);
      dot[block][0] *= even * query.unit[0];
      dot[block][1] *= odd * query.unit[0];
      dot[block][2] *= even * query.unit[1];
      dot[block][3] *= odd * query.unit[1];
    }
  }

  /// Adds 16 elements of pe to two blocks: BF16 as they are, else codes as those of the latents.
  __device__ __forceinline__ void add_pe(float (&dot0)[4], float (&dot1)[4], uint32_t operands, int first) const {
    constexpr int kPeBytes = F::kPlainPe ? int(sizeof(BFloat16)) : 1;
    uint32_t x[4];  // BF16: of each block elements 0..7 and 8..15; else of each block its codes, twice
    const int block = F::kPlainPe ? lane / 16 : lane / 8 % 2, piece = F::kPlainPe ? lane / 8 % 2 : 0;
    load_matrices(x, operands + (first + block * 8 + lane % 8) * F::kOperandPitch + F::kPeAt + group() * 16 * kPeBytes +
                         piece * 16);
    if constexpr (F::kPlainPe) {
      mma_bf16(dot0, query.pe, x[0], x[1]);
      mma_bf16(dot1, query.pe, x[2], x[3]);
    } else {
      mma_f16(dot0, query.pe, low_e4m3_to_f16(x[0]), high_e4m3_to_f16(x[0]));
      mma_f16(dot1, query.pe, low_e4m3_to_f16(x[1]), high_e4m3_to_f16(x[1]));
    }
  }

  /// `count` neighbouring floats of shared memory, 2 or 4.
  static __device__ __forceinline__ void load_floats(const float* from, float (&to)[kLaneKeys]) {
    if constexpr (kLaneKeys == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(from);
      to[0] = two.x;
      to[1] = two.y;
    }
  }

  /// Logits of the lane's keys.
  __device__ __forceinline__ void add_groups(int first, float (&x)[kLaneKeys]) const {
    load_floats(&shared.logits[0][head()][first], x);
#pragma unroll
    for (int g = 1; g < kKeyGroups; ++g) {
      float part[kLaneKeys];
      load_floats(&shared.logits[g][head()][first], part);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) x[j] += part[j];
    }
  }

  /// p times each group's scale of the key, in units that follow the largest product.
  __device__ __forceinline__ void store_scaled(int first, const float (&p)[kLaneKeys], float rescale) {
    float product[kScaleGroups][kLaneKeys], most[kScaleGroups] = {};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      load_floats(&shared.scales[g][first], product[g]);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        product[g][j] *= p[j];
        most[g] = fmaxf(most[g], product[g][j]);
      }
    }
    const float tile_weight = largest_of_group(most);
    const int field_before = unit_field(weight);
    weight = fmaxf(weight * rescale, tile_weight);
    const int field = unit_field(weight);
    const float change = power_of_two(min(max(127 + field_before - field, 0), 254));
    if (lane % 4 == 0) shared.rescale[head()][lane / 4 % 4] = rescale * change;
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) store_p(g, first, product[g], of_group(into_unit(field), g));
  }

  /// The largest of `values[g]` over the half warp, for g = (lane / 4) % 4: each exchange halves what a lane keeps.
  __device__ __forceinline__ float largest_of_group(const float (&values)[4]) const {
    const bool upper = (lane & 8) != 0, odd = (lane & 4) != 0;
    const float kept0 =
        fmaxf(upper ? values[2] : values[0], __shfl_xor_sync(kWholeWarp, upper ? values[0] : values[2], 8));
    const float kept1 =
        fmaxf(upper ? values[3] : values[1], __shfl_xor_sync(kWholeWarp, upper ? values[1] : values[3], 8));
    float result = fmaxf(odd ? kept1 : kept0, __shfl_xor_sync(kWholeWarp, odd ? kept0 : kept1, 4));
    result = fmaxf(result, __shfl_xor_sync(kWholeWarp, result, 2));
    return fmaxf(result, __shfl_xor_sync(kWholeWarp, result, 1));
  }
  /// What the lanes of this half warp that have group `g` hold.
  __device__ __forceinline__ float of_group(float value, int g) const {
    return __shfl_sync(kWholeWarp, value, (lane & 16) + 4 * g);
  }

  __device__ __forceinline__ void store_p(int g, int first, const float (&p)[kLaneKeys], float factor) {
    __half* to = &shared.p[g][head()][first];
    const uint32_t low = half2_bits(__floats2half2_rn(p[0] * factor, p[1] * factor));
    if constexpr (kLaneKeys == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(low, half2_bits(__floats2half2_rn(p[2] * factor, p[3] * factor)));
    } else {
      *reinterpret_cast<uint32_t*>(to) = low;
    }
  }

  __device__ __forceinline__ void rescale_latents(int scale_group) {
    const float first = shared.rescale[lane / 4][scale_group], second = shared.rescale[lane / 4 + 8][scale_group];
    if (!__any_sync(kWholeWarp, first != 1.0f || second != 1.0f)) return;
#pragma unroll
    for (auto& block : latent) {
#pragma unroll
      for (auto& columns : block) {
        columns[0] *= first;
        columns[1] *= first;
        columns[2] *= second;
        columns[3] *= second;
      }
    }
  }

  /// Sums of 16 latents over the 16 keys of a step: the two codes that ldmatrix leaves of each key are an even and an
  /// odd latent.
  __device__ __forceinline__ void multiply_block(float (&sums)[2][4], const uint32_t (&p)[4], uint32_t codes0,
                                                 uint32_t codes8, int step, int block) {
    constexpr uint32_t kByLatent = 0x3120;  // {key 0, key 1} of the even latent, then of the odd one
    codes0 = permute_bytes(codes0, 0, kByLatent);
    codes8 = permute_bytes(codes8, 0, kByLatent);
    uint32_t even[2] = {low_e4m3_to_f16(codes0), low_e4m3_to_f16(codes8)};
    uint32_t odd[2] = {high_e4m3_to_f16(codes0), high_e4m3_to_f16(codes8)};
    if constexpr (F::kExpanded) {
      const __half* scales = &expanded.by_block[warp * kBlocks16 + block][step * 16 + 2 * (lane % 4)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __half2 scale = *reinterpret_cast<const __half2*>(scales + 8 * i);
        even[i] = multiply_half2(even[i], scale);
        odd[i] = multiply_half2(odd[i], scale);
      }
    }
    mma_f16(sums[0], p, even[0], even[1]);
    mma_f16(sums[1], p, odd[0], odd[1]);
  }
};

/// Widens a raw `nvfp4_ds_mla` tile, all math warps together: e2m1 codes become e4m3 codes of 2^-6 times the value, and
/// e4m3 scales FP16 numbers of 2^6 times theirs; both exact.
template <int Keys>
__device__ __forceinline__ void expand_tile(const std::byte* tile, ExpandedTile<Keys>& out, int thread) {
  using Format = FewHeadsFormat<KvFormat::kNvfp4DsMla>;
  constexpr int kThreads = 32 * kMathWarps;
  constexpr int kPieces = kLatent / 16;  // of 8 bytes
#pragma unroll 4
  for (int turn = 0; turn < Keys * kPieces / kThreads; ++turn) {
    const int key = thread / kPieces + turn * (kThreads / kPieces), piece = thread % kPieces;
    const uint2 codes =
        *reinterpret_cast<const uint2*>(tile + key * Format::kPitch + KvNvfp4DsMla::kValuesAt + piece * 8);
    uint32_t wide[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t x = j == 0 ? codes.x : codes.y;
      const uint32_t even = (x << 2 & 0x1C1C1C1Cu) | (x << 4 & 0x80808080u);
      const uint32_t odd = (x >> 2 & 0x1C1C1C1Cu) | (x & 0x80808080u);
      wide[2 * j] = permute_bytes(even, odd, 0x5140);
      wide[2 * j + 1] = permute_bytes(even, odd, 0x7362);
    }
    *reinterpret_cast<uint4*>(out.operands + key * Format::kOperandPitch + piece * 16) =
        make_uint4(wide[0], wide[1], wide[2], wide[3]);
  }
  const int key = thread / 4, part = thread % 4;
  if (key >= Keys) return;
  *reinterpret_cast<uint4*>(out.operands + key * Format::kOperandPitch + Format::kPeAt + part * 16) =
      *reinterpret_cast<const uint4*>(tile + key * Format::kPitch + KvNvfp4DsMla::kPeAt + part * 16);
  // Eight neighbouring scales are those of blocks part, part + 4, and so on (KvNvfp4DsMla::scale_at).
  const uint2 scales = *reinterpret_cast<const uint2*>(tile + key * Format::kPitch + KvNvfp4DsMla::scale_at(part));
  const __half2 widening = __float2half2_rn(64.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t four = i < 2 ? scales.x : scales.y;
    const __half2 pair = __hmul2(half2_of(i % 2 == 0 ? low_e4m3_to_f16(four) : high_e4m3_to_f16(four)), widening);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int block = part + 4 * (2 * i + j);
      const __half scale = j == 0 ? __low2half(pair) : __high2half(pair);
      out.by_key[key][block] = scale;
      out.by_block[block][key] = scale;
    }
  }
}

}  // namespace dsacore::cuda
