// Sparse core for few heads: what a math warp does with a tile of keys. Products are mma.sync in FP16 with FP32 sums;
// e4m3 and e2m1 codes, and the products of the latter with their block scales, are exact in FP16.
#pragma once

#include "backends/cuda/half_warp.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/sparse_core_few_query.cuh"
#include "backends/cuda/sparse_core_few_shared.cuh"
#include "backends/cuda/sparse_core_few_widen.cuh"

namespace dsacore::cuda {

/// All math warps meet; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void math_barrier() { barrier_meet(1, 32 * kMathWarps); }

/// p refers to a logit that is at most this far below the largest, to base 2.
inline constexpr float kGrowth = 3;

/// p in shared memory is p * scale of the key and group * 2^11 / 2^unit, where 2^unit is the largest p * scale of the
/// head and group when it was last looked for, rounded down to a power of two: what FP16 loses is less than 2^-35 of
/// the largest, and it overflows where p * scale grows 16-fold, which is then looked for again. Fields are biased
/// exponents, bounded so that all factors are normal numbers.
inline constexpr int kUnitHeadroom = 11;
inline constexpr float kLargestHalf = 65504;
inline constexpr int kLeastUnitField = 15, kLargestUnitField = 254;
__device__ __forceinline__ int unit_field(float largest_weight) {
  return min(max(int(bits_of(largest_weight) >> 23), kLeastUnitField), kLargestUnitField);
}
__device__ __forceinline__ float into_unit(int field) { return power_of_two(2 * 127 + kUnitHeadroom - field); }
__device__ __forceinline__ float out_of_unit(int field) { return power_of_two(field - kUnitHeadroom); }

/// One math warp of eight. In the logits it has one group of latents and one half of the keys, in the softmax two
/// heads of each sixteen, one each half of the warp, in the latents 64 columns. `Sixteens`: of heads, the rows of an
/// operand.
template <KvFormat Format, int Keys, int Sixteens>
struct MathWarp {
  using F = FewHeadsFormat<Format>;
  using Shared = FewHeadsShared<Format, Keys, Sixteens>;
  static constexpr int kScaleGroups = F::kScaleGroups;
  static constexpr int kWarpKeys = Keys / 2;
  static constexpr int kWarpLatents = kLatent / kMathWarps, kBlocks16 = kWarpLatents / 16;
  static constexpr int kHeads = 16 / kMathWarps;  ///< of each sixteen
  static constexpr int kLaneKeys = Keys / 16;
  static constexpr int kBlocks = kWarpKeys / 8;  ///< of keys, in the logits
  static constexpr int kTogether = kBlocks < 4 / Sixteens ? kBlocks : 4 / Sixteens;
  using Dot = float[kBlocks][Sixteens][4];

  Shared& shared;
  uint32_t shared_at;  ///< address of `shared`
  int warp, lane;
  float exp2_scale;  ///< of logits, to base 2

  QueryFragments<Format> query[Sixteens];
  /// Sums of heads r and r + 8 of each sixteen, r = lane / 4, in their units: of 16 latents from 16 q the pairs of
  /// columns {4c, 4c + 2} at [q][0] and {4c + 1, 4c + 3} at [q][1], c = lane % 4.
  float latent[Sixteens][kBlocks16][2][4] = {};
  /// Of the lane's head of a sixteen: see `head`.
  struct Softmax {
    float reference = -HUGE_VALF;  ///< the logit that p refers to
    float sum = 0;                 ///< this lane's part
    float weight = 0;              ///< the largest p * scale of group (lane / 4) % 4, when last looked for
    float factors[kScaleGroups];   ///< of p * scale, into each group's unit
  };
  Softmax softmax_of[Sixteens];

  __device__ __forceinline__ MathWarp(Shared& s, uint32_t at, int warp_index, int lane_index, float scale)
      : shared(s), shared_at(at), warp(warp_index), lane(lane_index), exp2_scale(scale) {}

  /// Makes the compiler work addresses out again in each phase of a tile, where it would rather keep them all and
  /// spill. Those of widened rows fit.
  __device__ __forceinline__ void forget_addresses() {
    if constexpr (!F::kWidened) asm volatile("" : "+r"(lane), "+r"(warp));
  }

  __device__ __forceinline__ int head(int sixteen) const { return 16 * sixteen + kHeads * warp + lane / 16; }
  __device__ __forceinline__ int group() const { return warp % kKeyGroups; }
  __device__ __forceinline__ int first_key() const { return warp / kKeyGroups * kWarpKeys; }

  /// The query of `heads` heads from shared memory. Not a loop: with one more around those of the fragments, the
  /// compiler leaves them in local memory.
  template <int Sixteen = 0>
  __device__ __forceinline__ void load_query(int heads) {
    query[Sixteen].load(shared.query + 16 * Sixteen * F::kQueryPitch, heads - 16 * Sixteen, group(), lane);
    query[Sixteen].convert(heads - 16 * Sixteen, lane);
    if constexpr (Sixteen + 1 < Sixteens) load_query<Sixteen + 1>(heads);
  }

  // ---- logits ----

  /// This warp's group's part of the dot products with its half of a tile's keys; `operands` is the tile's address.
  __device__ __forceinline__ void logits(const std::byte* tile, uint32_t operands) {
    forget_addresses();
    const int first = first_key();
    Dot dot = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) multiply_keys(dot[block], operands, first + block * 8, half);
    }
    if constexpr (F::kPlainPe) scale_latents(dot, tile, first);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) add_pe(dot[block], dot[block + 1], operands, first + block * 8);
    store_logits(dot);
  }

  /// The same of a tile whose values are left widened at `values`.
  __device__ __forceinline__ void logits_and_widen(const std::byte* tile, std::byte* values) {
    const int key = first_key() + lane / 4;
    // All loads before the first store, which they cannot be moved across.
    const LaneCodes<kBlocks> codes(tile + key * F::kPitch, group(), lane);
    values += key * F::kValuePitch + (group() * kGroupLatents + lane % 4 * 16) * int(sizeof(uint16_t));
    Dot dot = {};
#pragma unroll
    for (int block = 0; block < kBlocks; block += kTogether) multiply_and_widen(dot, block, codes, values);
    store_logits(dot);
  }

  // ---- softmax ----

  /// p of the tile's keys, of which the first `keys` count, and what the latents so far must be multiplied with.
  __device__ __forceinline__ void softmax(int keys) {
    forget_addresses();
    const int first = kLaneKeys * (lane % 16);
    float x[Sixteens][kLaneKeys];
    Weighed weighed[Sixteens];
    bool fits = true;
#pragma unroll
    for (int s = 0; s < Sixteens; ++s) {
      add_groups(s, first, x[s]);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        if (first + j >= keys) x[s][j] = -HUGE_VALF;
      }
      fits = weigh_by_units(s, first, x[s], weighed[s]) && fits;
    }
    const bool all_fit = __all_sync(kWholeWarp, fits);
#pragma unroll
    for (int s = 0; s < Sixteens; ++s) {
      float rescale = 1;
      if (!all_fit) rescale = refer_anew(s, first, x[s], weighed[s]);
      store(s, first, weighed[s], rescale);
    }
  }

  // ---- latents ----

  /// `values` is the address of the tile: of operands, or of widened values.
  __device__ __forceinline__ void latents(uint32_t values) {
    forget_addresses();
    const int scale_group = kScaleGroups > 1 ? warp * kWarpLatents / kGroupLatents : 0;
#pragma unroll
    for (int s = 0; s < Sixteens; ++s) rescale_latents(s, scale_group);
#pragma unroll
    for (int step = 0; step < Keys / 16; ++step) {
      uint32_t p[Sixteens][4];
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        const int row = (scale_group * Sixteens + s) * 16 + lane % 16;
        load_matrices(p[s], shared_at + uint32_t(offsetof(Shared, p)) +
                                uint32_t((row * (Keys + 8) + step * 16 + lane / 16 * 8) * int(sizeof(uint16_t))));
      }
      if constexpr (F::kWidened) {
        multiply_values(values + (step * 16 + lane % 16) * F::kValuePitch + warp * kWarpLatents * 2 + lane / 16 * 16,
                        p);
      } else {
#pragma unroll
        for (int j = 0; j < kBlocks16 / 2; ++j) {
          uint32_t codes[4];  // of two blocks of 16 latents, each for keys 0..7 and 8..15 of the step
          load_matrices_transposed(codes, values + (step * 16 + lane % 16) * F::kOperandPitch + warp * kWarpLatents +
                                              j * 32 + lane / 16 * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply_block(2 * j + i, p, codes[2 * i], codes[2 * i + 1]);
        }
      }
    }
  }

  // ---- the part ----

  /// Leaves the sums of `heads` heads from `first_head` on in memory, as split `split` of `splits`.
  __device__ __forceinline__ void leave(const Parts& parts, int64_t row, int split, int splits, int all_heads,
                                        int first_head, int heads) {
#pragma unroll
    for (int s = 0; s < Sixteens; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int latent_head = 16 * s + lane / 4 + 8 * i;
        if (latent_head >= heads) continue;
        float* to = parts.latents + ((row * splits + split) * all_heads + first_head + latent_head) * kLatent +
                    warp * kWarpLatents;
#pragma unroll
        for (int q = 0; q < kBlocks16; ++q) {
          const auto& even = latent[s][q][0];
          const auto& odd = latent[s][q][1];
          __stcg(reinterpret_cast<float4*>(to) + 4 * q + lane % 4,
                 make_float4(even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]));
        }
      }
      const Softmax& own = softmax_of[s];
      const float all = half_warp_sum(own.sum);
      if (lane % 4 != 0 || head(s) >= heads) continue;
      const int64_t list = row * all_heads + first_head + head(s);
      const float unit = kScaleGroups > 1 ? out_of_unit(unit_field(own.weight)) : 1.0f / (1 << kUnitHeadroom);
      __stcg(parts.units + (list * kKeyGroups + lane / 4 % 4) * splits + split, unit);
      if (lane % 16 == 0) {
        __stcg(reinterpret_cast<float2*>(parts.softmax + list * splits + split), make_float2(own.reference, all));
      }
    }
  }

 private:
  /// Dot products with eight keys over 64 latents.
  __device__ __forceinline__ void multiply_keys(float (&dot)[Sixteens][4], uint32_t operands, int key, int half) const {
    uint32_t codes[4];
    load_matrices(
        codes, operands + (key + lane % 8) * F::kOperandPitch + group() * kGroupLatents + (half * 4 + lane / 8) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = low_e4m3_to_f16(codes[i]), high = high_e4m3_to_f16(codes[i]);
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) mma_f16(dot[s], query[s].latent[half * 4 + i], low, high);
    }
  }

  /// Dot products with `kTogether` blocks of eight keys from block `first` on; `values` is the lane's place for widened
  /// ones of the tile.
  __device__ __forceinline__ void multiply_and_widen(Dot& dot, int first, const LaneCodes<kBlocks>& codes,
                                                     std::byte* values) const {
#pragma unroll
    for (int block = first; block < first + kTogether; ++block) {
      const uint32_t low = low_e4m3_to_f16(codes.pe[block]), high = high_e4m3_to_f16(codes.pe[block]);
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) mma_f16(dot[block][s], query[s].pe, low, high);
    }
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {  // the even and the odd latents of each 64
      uint32_t wide[kTogether][4];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        codes.widen(first + i, piece / 2, piece % 2, wide[i]);
        *reinterpret_cast<uint4*>(values + (first + i) * 8 * F::kValuePitch + piece / 2 * 128 + piece % 2 * 16) =
            make_uint4(wide[i][0], wide[i][1], wide[i][2], wide[i][3]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int s = 0; s < Sixteens; ++s) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            mma_f16(dot[first + i][s], query[s].latent[piece * 2 + j], wide[i][2 * j], wide[i][2 * j + 1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_logits(const Dot& dot) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        float* row = &shared.logits[group()][16 * s + lane / 4][first_key() + block * 8 + 2 * (lane % 4)];
        const auto& sums = dot[block][s];
        *reinterpret_cast<float2*>(row) = make_float2(sums[0], sums[1]);
        *reinterpret_cast<float2*>(row + 8 * (Keys + 8)) = make_float2(sums[2], sums[3]);
      }
    }
  }

  /// Dot products of FP16 queries with codes, times the scales of key and query.
  __device__ __forceinline__ void scale_latents(float (&dot)[kBlocks][Sixteens][4], const std::byte* tile, int first) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int key = first + block * 8 + 2 * (lane % 4);
      const std::byte* scale = tile + key * F::kPitch + KvFp8DsMla::kScalesAt + group() * int(sizeof(float));
      const float even = *reinterpret_cast<const float*>(scale),
                  odd = *reinterpret_cast<const float*>(scale + F::kPitch);
      if (lane < 4) *reinterpret_cast<float2*>(&shared.scales[group()][key]) = make_float2(even, odd);
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        auto& sums = dot[block][s];
        sums[0] *= even * query[s].unit[0];
        sums[1] *= odd * query[s].unit[0];
        sums[2] *= even * query[s].unit[1];
        sums[3] *= odd * query[s].unit[1];
      }
    }
  }

  /// Adds 16 elements of pe to two blocks: BF16 as they are, else codes as those of the latents.
  __device__ __forceinline__ void add_pe(float (&dot0)[Sixteens][4], float (&dot1)[Sixteens][4], uint32_t operands,
                                         int first) const {
    constexpr int kPeBytes = F::kPlainPe ? int(sizeof(BFloat16)) : 1;
    uint32_t x[4];  // BF16: of each block elements 0..7 and 8..15; else of each block its codes, twice
    const int block = F::kPlainPe ? lane / 16 : lane / 8 % 2, piece = F::kPlainPe ? lane / 8 % 2 : 0;
    load_matrices(x, operands + (first + block * 8 + lane % 8) * F::kOperandPitch + F::kPeAt + group() * 16 * kPeBytes +
                         piece * 16);
    if constexpr (F::kPlainPe) {
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        mma_bf16(dot0[s], query[s].pe, x[0], x[1]);
        mma_bf16(dot1[s], query[s].pe, x[2], x[3]);
      }
    } else {
      const uint32_t low0 = low_e4m3_to_f16(x[0]), high0 = high_e4m3_to_f16(x[0]);
      const uint32_t low1 = low_e4m3_to_f16(x[1]), high1 = high_e4m3_to_f16(x[1]);
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        mma_f16(dot0[s], query[s].pe, low0, high0);
        mma_f16(dot1[s], query[s].pe, low1, high1);
      }
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

  /// Of the lane's keys and its head of a sixteen: what is stored of p, and its sum.
  struct Weighed {
    uint32_t halves[kScaleGroups][kLaneKeys / 2];
    float sum;
  };

  /// p by the reference and the units of the tiles before, as is right but for few tiles. False where it is too large
  /// for them.
  __device__ __forceinline__ bool weigh_by_units(int sixteen, int first, const float (&x)[kLaneKeys],
                                                 Weighed& weighed) const {
    const Softmax& own = softmax_of[sixteen];
    float p[kLaneKeys];
    bool fits = true;
    weighed.sum = 0;
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      const float exponent = (x[j] - own.reference) * exp2_scale;
      fits = fits && !(exponent > kGrowth);
      p[j] = exp2_approx(exponent);
      weighed.sum += p[j];
    }
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      float weights[kLaneKeys];
      weigh(g, first, p, weights);
      into_units(own, g, weights, weighed);
      if constexpr (kScaleGroups > 1) {
#pragma unroll
        for (const float weight : weights) fits = fits && !(weight > kLargestHalf);
      }
    }
    return fits;
  }

  /// p by the largest logit so far, in units of the largest p * scale. Returns what the latents so far are to be
  /// multiplied with; those of group (lane / 4) % 4 where each has a unit.
  __device__ __forceinline__ float refer_anew(int sixteen, int first, const float (&x)[kLaneKeys], Weighed& weighed) {
    Softmax& own = softmax_of[sixteen];
    float largest = own.reference;
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) largest = fmaxf(largest, x[j]);
    largest = half_warp_max(largest);
    float rescale = exp2_approx((own.reference - largest) * exp2_scale);
    own.reference = largest;
    own.sum *= rescale;
    float p[kLaneKeys];
    weighed.sum = 0;
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      p[j] = x[j] == -HUGE_VALF ? 0.0f : exp2_approx((x[j] - largest) * exp2_scale);
      weighed.sum += p[j];
    }
    float weights[kScaleGroups][kLaneKeys];
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) weigh(g, first, p, weights[g]);
    if constexpr (kScaleGroups > 1) rescale *= choose_units(own, weights, rescale);
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) into_units(own, g, weights[g], weighed);
    return rescale;
  }

  /// Units by the largest of `weights` and of those before, times `rescale`. Returns 2 to the old less the new unit of
  /// group (lane / 4) % 4.
  __device__ __forceinline__ float choose_units(Softmax& own, const float (&weights)[kScaleGroups][kLaneKeys],
                                                float rescale) const {
    float most[kScaleGroups] = {};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
#pragma unroll
      for (const float weight : weights[g]) most[g] = fmaxf(most[g], weight);
    }
    const int before = unit_field(own.weight);
    own.weight = fmaxf(own.weight * rescale, largest_of_group(most));
    const int field = unit_field(own.weight);
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) own.factors[g] = of_group(into_unit(field), g);
    return power_of_two(min(max(127 + before - field, 0), 254));
  }

  /// p times each key's scale of group `g`, or in the one unit that there is.
  __device__ __forceinline__ void weigh(int g, int first, const float (&p)[kLaneKeys],
                                        float (&weights)[kLaneKeys]) const {
    if constexpr (kScaleGroups > 1) load_floats(&shared.scales[g][first], weights);
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      weights[j] = p[j] * (kScaleGroups > 1 ? weights[j] : float(1 << kUnitHeadroom));
    }
  }

  /// To FP16, in the group's unit.
  __device__ __forceinline__ void into_units(const Softmax& own, int g, float (&weights)[kLaneKeys],
                                             Weighed& weighed) const {
    if constexpr (kScaleGroups > 1) {
#pragma unroll
      for (float& weight : weights) weight *= own.factors[g];
    }
#pragma unroll
    for (int i = 0; i < kLaneKeys / 2; ++i) weighed.halves[g][i] = to_f16(weights[2 * i], weights[2 * i + 1]);
  }

  __device__ __forceinline__ void store(int sixteen, int first, const Weighed& weighed, float rescale) {
    softmax_of[sixteen].sum += weighed.sum;
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      uint16_t* to = &shared.p[g][head(sixteen)][first];
      if constexpr (kLaneKeys == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(weighed.halves[g][0], weighed.halves[g][1]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = weighed.halves[g][0];
      }
    }
    if (lane % (16 / kScaleGroups) == 0) shared.rescale[head(sixteen)][lane % 16 * kScaleGroups / 16] = rescale;
  }

  /// Logits of the lane's keys.
  __device__ __forceinline__ void add_groups(int sixteen, int first, float (&x)[kLaneKeys]) const {
    load_floats(&shared.logits[0][head(sixteen)][first], x);
#pragma unroll
    for (int g = 1; g < kKeyGroups; ++g) {
      float part[kLaneKeys];
      load_floats(&shared.logits[g][head(sixteen)][first], part);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) x[j] += part[j];
    }
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

  __device__ __forceinline__ void rescale_latents(int sixteen, int scale_group) {
    const int head = 16 * sixteen + lane / 4;
    const float first = shared.rescale[head][scale_group], second = shared.rescale[head + 8][scale_group];
    if (!__any_sync(kWholeWarp, first != 1.0f || second != 1.0f)) return;
#pragma unroll
    for (auto& block : latent[sixteen]) {
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
  __device__ __forceinline__ void multiply_block(int block, const uint32_t (&p)[Sixteens][4], uint32_t codes0,
                                                 uint32_t codes8) {
    constexpr uint32_t kByLatent = 0x3120;  // {key 0, key 1} of the even latent, then of the odd one
    codes0 = permute_bytes(codes0, 0, kByLatent);
    codes8 = permute_bytes(codes8, 0, kByLatent);
    const uint32_t even[2] = {low_e4m3_to_f16(codes0), low_e4m3_to_f16(codes8)};
    const uint32_t odd[2] = {high_e4m3_to_f16(codes0), high_e4m3_to_f16(codes8)};
#pragma unroll
    for (int s = 0; s < Sixteens; ++s) {
      mma_f16(latent[s][block][0], p[s], even[0], even[1]);
      mma_f16(latent[s][block][1], p[s], odd[0], odd[1]);
    }
  }

  /// The same of widened values, all of this warp's latents; `from` is this lane's row of the first two matrices.
  __device__ __forceinline__ void multiply_values(uint32_t from, const uint32_t (&p)[Sixteens][4]) {
#pragma unroll
    for (int block = 0; block < kBlocks16; ++block) {
      uint32_t x[4];  // of the even and then of the odd latents keys 0..7 and 8..15
      load_matrices_transposed(x, from + block * 32);
#pragma unroll
      for (int s = 0; s < Sixteens; ++s) {
        mma_f16(latent[s][block][0], p[s], x[0], x[1]);
        mma_f16(latent[s][block][1], p[s], x[2], x[3]);
      }
    }
  }
};

}  // namespace dsacore::cuda
