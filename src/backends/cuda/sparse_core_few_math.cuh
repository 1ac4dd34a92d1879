// Sparse core for few heads: what a math warp does with a tile of keys. Products are mma.sync in FP16 with FP32 sums;
// e4m3 and e2m1 codes, and the products of the latter with their block scales, are exact in FP16.
#pragma once

#include <cuda_fp16.h>

#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"

namespace dsacore::cuda {

inline constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

/// 2^x for x <= 0; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
/// 2^(field - 127) for a biased exponent of 1..254.
__device__ __forceinline__ float power_of_two(int field) { return float_of(uint32_t(field) << 23); }
__device__ __forceinline__ uint32_t half2_bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ __forceinline__ __half2 half2_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, __half2 b) { return half2_bits(__hmul2(half2_of(a), b)); }

/// All math warps meet; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void math_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kMathWarps) : "memory"); }

/// p in shared memory is p * scale of the key and group * 2^14 / 2^unit, where 2^unit is the largest p * scale so far of
/// the head and group, rounded down to a power of two: FP16 holds it without overflow, and what it loses below is less
/// than 2^-38 of the largest. Fields are biased exponents, bounded so that all factors are normal numbers.
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

  __device__ __forceinline__ void load(const QueryRows& query, int64_t row, int group, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = lane / 4 + 8 * i;
      const int at = group * kGroupLatents + 4 * (lane % 4);
      if (head >= query.heads) {
        unit[i] = 1;
#pragma unroll
        for (int step = 0; step < kGroupLatents / 16; ++step) latent[step][i] = latent[step][i + 2] = 0;
        pe[i] = pe[i + 2] = 0;
      } else if constexpr (FewHeadsFormat<Format>::kPlainPe) {
        load_bf16(query.bf16(row, head), at, kLatent + group * 16 + 2 * (lane % 4), i);
      } else {
        load_e4m3(query.e4m3(row, head), at, kLatent + group * 16 + 4 * (lane % 4), i);
      }
    }
    if constexpr (FewHeadsFormat<Format>::kPlainPe) to_half();
  }

 private:
  __device__ __forceinline__ void load_bf16(const BFloat16* query, int at, int pe_at, int i) {
#pragma unroll
    for (int step = 0; step < kGroupLatents / 16; ++step) {
      const uint2 four = *reinterpret_cast<const uint2*>(query + at + 16 * step);
      latent[step][i] = four.x;
      latent[step][i + 2] = four.y;
    }
    pe[i] = *reinterpret_cast<const uint32_t*>(query + pe_at);
    pe[i + 2] = *reinterpret_cast<const uint32_t*>(query + pe_at + 8);
  }
  __device__ __forceinline__ void load_e4m3(const uint8_t* query, int at, int pe_at, int i) {
    unit[i] = 1;
#pragma unroll
    for (int step = 0; step < kGroupLatents / 16; ++step) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(query + at + 16 * step);
      latent[step][i] = low_e4m3_to_f16(four);
      latent[step][i + 2] = high_e4m3_to_f16(four);
    }
    const uint32_t four = *reinterpret_cast<const uint32_t*>(query + pe_at);
    pe[i] = low_e4m3_to_f16(four);
    pe[i + 2] = high_e4m3_to_f16(four);
  }

  /// BF16 pairs to FP16 pairs, each head's largest magnitude in this group moved to 2^12..2^13.
  __device__ __forceinline__ void to_half() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t largest = 0;  // of the magnitudes' bits
#pragma unroll
      for (int step = 0; step < kGroupLatents / 16; ++step) {
#pragma unroll
        for (int j = i; j < 4; j += 2) {
          largest = max(largest, max(latent[step][j] & 0x7FFFu, latent[step][j] >> 16 & 0x7FFFu));
        }
      }
      largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
      largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
      const int field = min(2 * 127 + 12 - int(largest >> 7), 253);
      const float factor = power_of_two(field);
      unit[i] = power_of_two(2 * 127 - field);
#pragma unroll
      for (int step = 0; step < kGroupLatents / 16; ++step) {
#pragma unroll
        for (int j = i; j < 4; j += 2) {
          const float even = float_of(latent[step][j] << 16), odd = float_of(latent[step][j] & 0xFFFF0000u);
          latent[step][j] = half2_bits(__floats2half2_rn(even * factor, odd * factor));
        }
      }
    }
  }
};

/// One math warp of eight. In the logits it has one group of latents and one half of the keys, in the softmax two
/// heads, in the latents 64 columns; 16 heads always.
template <KvFormat Format, int Keys>
struct MathWarp {
  using F = FewHeadsFormat<Format>;
  using Shared = FewHeadsShared<Format, Keys>;
  static constexpr int kScaleGroups = F::kScaleGroups;
  static constexpr int kWarpKeys = Keys / 2, kKeyBlocks = kWarpKeys / 8;
  static constexpr int kWarpLatents = kLatent / kMathWarps, kBlocks16 = kWarpLatents / 16;
  static constexpr int kHeads = kFewHeadsMax / kMathWarps;
  static constexpr int kLaneKeys = Keys / 32;

  Shared& shared;
  ExpandedTile<Keys>& expanded;  ///< where the format has one
  uint32_t shared_at;  ///< address of `shared`
  int warp, lane;
  float exp2_scale;  ///< of logits, to base 2

  QueryFragments<Format> query;
  /// Sums of heads r and r + 8, r = lane / 4, in their units: of 16 latents from 16 q the pairs of columns {4c, 4c + 2}
  /// at [q][0] and {4c + 1, 4c + 3} at [q][1], c = lane % 4.
  float latent[kBlocks16][2][4] = {};
  float largest[kHeads];                 ///< logit
  float sum[kHeads] = {};                ///< this lane's part

  __device__ __forceinline__ MathWarp(Shared& s, uint32_t at, int warp_index, int lane_index, float scale)
      : shared(s),
        expanded(*reinterpret_cast<ExpandedTile<Keys>*>(&s + 1)),
        shared_at(at), warp(warp_index), lane(lane_index), exp2_scale(scale) {
#pragma unroll
    for (float& x : largest) x = -HUGE_VALF;
    if (lane < kHeads) *reinterpret_cast<float4*>(shared.weight[kHeads * warp + lane]) = make_float4(0, 0, 0, 0);
    __syncwarp();
  }

  __device__ __forceinline__ int group() const { return warp % kKeyGroups; }

  // ---- logits ----

  /// This warp's group's part of the dot products with its half of the tile's keys; `tile` is the raw tile, `operands`
  /// the address of what is multiplied.
  __device__ __forceinline__ void logits(const std::byte* tile, uint32_t operands) {
    const int first = warp / kKeyGroups * kWarpKeys;
    float dot[kKeyBlocks][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        const int key = first + block * 8;
        uint32_t codes[4];
        load_matrices(codes, operands + (key + lane % 8) * F::kOperandPitch + group() * kGroupLatents +
                                 (half * 4 + lane / 8) * 16);
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
          mma_f16(dot[block], query.latent[half * 4 + i], low, high);
        }
      }
    }
    if constexpr (F::kPlainPe) {
      scale_latents(dot, tile, first);
      add_bf16_pe(dot, operands, first);
    } else {
      add_e4m3_pe(dot, operands, first);
    }
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      const int key = first + block * 8 + 2 * (lane % 4);
      float* row = &shared.logits[group()][lane / 4][key];
      *reinterpret_cast<float2*>(row) = make_float2(dot[block][0], dot[block][1]);
      *reinterpret_cast<float2*>(row + 8 * (Keys + 8)) = make_float2(dot[block][2], dot[block][3]);
    }
  }

  // ---- softmax ----

  /// The tile's p of two heads, of which the first `keys` count, and what the latents so far must be multiplied with.
  __device__ __forceinline__ void softmax(const std::byte* tile, int keys) {
    float x[kHeads][kLaneKeys], tile_largest[kHeads];
    const int key = kLaneKeys * lane;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      add_groups(kHeads * warp + h, x[h]);
      tile_largest[h] = largest[h];
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        if (key + j >= keys) x[h][j] = -HUGE_VALF;
        tile_largest[h] = fmaxf(tile_largest[h], x[h][j]);
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (float& value : tile_largest) value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, distance));
    }
    float rescale[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      rescale[h] = exp2_of((largest[h] - tile_largest[h]) * exp2_scale);
      largest[h] = tile_largest[h];
      sum[h] *= rescale[h];
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        x[h][j] = key + j < keys ? exp2_of((x[h][j] - largest[h]) * exp2_scale) : 0.0f;
        sum[h] += x[h][j];
      }
    }
    if constexpr (kScaleGroups > 1) {
      store_scaled(tile, x, rescale);
    } else {
      constexpr float kUnit = float(1 << kUnitHeadroom);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float scaled[kLaneKeys];
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) scaled[j] = x[h][j] * kUnit;
        store_p(0, kHeads * warp + h, scaled);
        if (lane == 0) shared.rescale[kHeads * warp + h][0] = rescale[h];
      }
    }
  }

  // ---- latents ----

  __device__ __forceinline__ void latents(uint32_t operands) {
    const int scale_group = kScaleGroups > 1 ? warp * kWarpLatents / kGroupLatents : 0;
    rescale_latents(scale_group);
#pragma unroll
    for (int step = 0; step < Keys / 16; ++step) {
      uint32_t p[4];
      load_matrices(p, shared_at + uint32_t(offsetof(Shared, p)) +
                           uint32_t(((scale_group * kFewHeadsMax + lane % 16) * (Keys + 8) + step * 16 + lane / 16 * 8) *
                                    int(sizeof(__half))));
#pragma unroll
      for (int j = 0; j < kBlocks16 / 2; ++j) {
        uint32_t codes[4];  // of two blocks of 16 latents, each for keys 0..7 and 8..15 of the step
        load_matrices_transposed(codes, operands + (step * 16 + lane % 16) * F::kOperandPitch + warp * kWarpLatents +
                                            j * 32 + lane / 16 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_block(latent[2 * j + i], p, codes[2 * i], codes[2 * i + 1], step, 2 * j + i);
      }
    }
  }

  /// Complete sums of the warp's heads, and the units of their latents.
  __device__ __forceinline__ HeadStatistics statistics(int h) const {
    float total = sum[h];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(kWholeWarp, total, distance);
    HeadStatistics result = {.largest = largest[h], .sum = total, .unused = {}, .unit = {}};
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      result.unit[g] = kScaleGroups > 1 ? out_of_unit(unit_field(shared.weight[kHeads * warp + h][g])) : 1.0f / (1 << kUnitHeadroom);
    }
    return result;
  }

 private:
  /// Dot products of FP16 queries with codes, times the scales of key and query.
  __device__ __forceinline__ void scale_latents(float (&dot)[kKeyBlocks][4], const std::byte* tile, int first) const {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      const std::byte* scale = tile + (first + block * 8 + 2 * (lane % 4)) * F::kPitch + KvFp8DsMla::kScalesAt +
                               group() * int(sizeof(float));
      const float even = *reinterpret_cast<const float*>(scale), odd = *reinterpret_cast<const float*>(scale + F::kPitch);
      dot[block][0] *= even * query.unit[0];
      dot[block][1] *= odd * query.unit[0];
      dot[block][2] *= even * query.unit[1];
      dot[block][3] *= odd * query.unit[1];
    }
  }
  __device__ __forceinline__ void add_bf16_pe(float (&dot)[kKeyBlocks][4], uint32_t operands, int first) const {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; block += 2) {
      uint32_t values[4];
      load_matrices(values, operands + (first + (block + lane / 16) * 8 + lane % 8) * F::kOperandPitch + F::kPeAt +
                                group() * 16 * int(sizeof(BFloat16)) + lane / 8 % 2 * 16);
      mma_bf16(dot[block], query.pe, values[0], values[1]);
      mma_bf16(dot[block + 1], query.pe, values[2], values[3]);
    }
  }
  __device__ __forceinline__ void add_e4m3_pe(float (&dot)[kKeyBlocks][4], uint32_t operands, int first) const {
    uint32_t codes[4];  // of 32 keys; with fewer, the first are read twice
    load_matrices(codes, operands + (first + lane % kWarpKeys) * F::kOperandPitch + F::kPeAt + group() * 16);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      mma_f16(dot[block], query.pe, low_e4m3_to_f16(codes[block]), high_e4m3_to_f16(codes[block]));
    }
  }

  __device__ __forceinline__ void add_groups(int head, float (&x)[kLaneKeys]) const {
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g) {
      const float* part = &shared.logits[g][head][kLaneKeys * lane];
      float values[kLaneKeys];
      if constexpr (kLaneKeys == 2) {
        const float2 two = *reinterpret_cast<const float2*>(part);
        values[0] = two.x;
        values[1] = two.y;
      } else {
        values[0] = part[0];
      }
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) x[j] = g == 0 ? values[j] : x[j] + values[j];
    }
  }

  /// p times each group's scale of the key, in units that follow the largest product.
  __device__ __forceinline__ void store_scaled(const std::byte* tile, const float (&p)[kHeads][kLaneKeys],
                                               const float (&rescale)[kHeads]) {
    float4 scales[kLaneKeys];
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      scales[j] = *reinterpret_cast<const float4*>(tile + (kLaneKeys * lane + j) * F::kPitch + KvFp8DsMla::kScalesAt);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float4& stored = *reinterpret_cast<float4*>(shared.weight[kHeads * warp + h]);
      const float4 old = stored;
      float weight[kScaleGroups] = {old.x, old.y, old.z, old.w};
      float factor[kScaleGroups];
#pragma unroll
      for (int g = 0; g < kScaleGroups; ++g) {
        float product[kLaneKeys];
        uint32_t tile_weight = 0;
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) {
          product[j] = p[h][j] * (g == 0 ? scales[j].x : g == 1 ? scales[j].y : g == 2 ? scales[j].z : scales[j].w);
          tile_weight = max(tile_weight, bits_of(product[j]));
        }
        tile_weight = __reduce_max_sync(kWholeWarp, tile_weight);
        const int before = unit_field(weight[g]);
        weight[g] = fmaxf(weight[g] * rescale[h], float_of(tile_weight));
        const int now = unit_field(weight[g]);
        factor[g] = rescale[h] * power_of_two(min(max(127 + before - now, 0), 254));
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) product[j] *= into_unit(now);
        store_p(g, kHeads * warp + h, product);
      }
      __syncwarp();
      if (lane == 0) {
        stored = make_float4(weight[0], weight[1], weight[2], weight[3]);
        *reinterpret_cast<float4*>(shared.rescale[kHeads * warp + h]) = make_float4(factor[0], factor[1], factor[2], factor[3]);
      }
    }
  }

  __device__ __forceinline__ void store_p(int g, int head, const float (&p)[kLaneKeys]) {
    __half* to = &shared.p[g][head][kLaneKeys * lane];
    if constexpr (kLaneKeys == 2) {
      *reinterpret_cast<__half2*>(to) = __floats2half2_rn(p[0], p[1]);
    } else {
      *to = __float2half_rn(p[0]);
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
  __device__ __forceinline__ void multiply_block(float (&sums)[2][4], const uint32_t (&p)[4], uint32_t codes0, uint32_t codes8,
                                                 int step, int block) {
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
#pragma unroll
  for (int i = thread; i < Keys * kPieces; i += kThreads) {
    const int key = i / kPieces, piece = i % kPieces;
    const uint2 codes = *reinterpret_cast<const uint2*>(tile + key * Format::kPitch + KvNvfp4DsMla::kValuesAt + piece * 8);
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
