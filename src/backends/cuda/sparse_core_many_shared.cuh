// Sparse core for many heads: what the warps of a CTA share, what a CTA has to do, and what its math warpgroups have in
// common.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many.h"
#include "backends/cuda/sparse_core_many_operands.cuh"

namespace dsacore::cuda::many {

inline constexpr int kScoreGroups = 2, kLatentGroups = 2;  // warpgroups, in this order; then one for everything else
inline constexpr int kScoreThreads = 128 * kScoreGroups, kLatentThreads = 128 * kLatentGroups;
inline constexpr int kMathThreads = kScoreThreads + kLatentThreads, kMathWarps = kMathThreads / 32;
inline constexpr int kThreads = kMathThreads + 128;
inline constexpr int kTileSlots = kManyHeadsTile / kSlotKeys;
inline constexpr int kProducers = 2, kHelpers = 2;  // 4 and none where there is nothing to prepare
inline constexpr int kScoreRegisters = 88, kLatentRegisters = 136, kOtherRegisters = 32;  // of 96 each
/// Fragments of a warp in registers, and of how many products they are made and multiplied at once: each time costs.
inline constexpr int kOpenKeys = 4, kOpenValues = 2, kAtOnce = 2;

/// The reference of a softmax is raised when a logit is 2^8 above it, so p stays below 2^8. Weights of V in units of
/// the keys stay below 2^14, and get a reference 2^6 above the largest when it is raised: FP16 then holds 20 more
/// powers of two below.
inline constexpr float kLargestP = 8, kLargestWeight = 14, kWeightRoom = 6;
/// A little below 2^kLargestP, and 2^kLargestWeight as FP16 in the high half of a word.
inline constexpr float kNearlyLargestP = 255;
inline constexpr uint32_t kNearlyLargestWeight = 0x73F00000;
/// The reference before the first logit, and the logit where there is no key: finite, so that no infinities meet, and
/// so low that beside any reference but the first p is 0.
inline constexpr float kNoLogit = -0x1p127f, kNoKeyLogit = -0x1p90f;
/// A weight is p, times 2^(exponent of the key - kUnitShift), times 2^(kUnitShift - offset of the head): nothing
/// between overflows, and the unit of every offset in this range is an FP32.
inline constexpr int kUnitShift = 4;
inline constexpr float kLeastOffset = -122, kMostOffset = 124;

/// Named barriers: of a warpgroup of scores (each its own), of both, and of all four math warpgroups.
enum NamedBarrier { kGroup = 1, kScores = 1 + kScoreGroups, kMath = 5 };

template <class Layout, int Columns>
struct Shared {
  static constexpr int kSlotBytes = kSlotKeys * RowOperands<Layout>::kPitch;
  static constexpr int kTableBytes = RowOperands<Layout>::kTableBytes > 0 ? RowOperands<Layout>::kTableBytes : 16;
  static constexpr int kBlockBytes = Columns * 128;  // 64 elements of every head
  static constexpr int kFixedBytes = (kQueryRow / 64 + kScoreGroups) * kBlockBytes + Columns * 80 + 64;
  static constexpr int kSlots = std::min(20, (kWholeOfShared - kFixedBytes) / (kSlotBytes + kTableBytes + 24));
  static_assert(kSlots >= 2 * kTileSlots, "two tiles are read at a time");

  alignas(1024) std::byte query[kQueryRow / 64][kBlockBytes];
  alignas(1024) std::byte weights[kScoreGroups][kBlockBytes];
  alignas(128) std::byte slots[kSlots][kSlotBytes];
  alignas(16) std::byte tables[kSlots][kTableBytes];
  alignas(16) float largest[Columns];                   ///< reference of p, base 2, an integer
  alignas(16) float offset[Columns];                    ///< what the reference of V's weights lies above it
  alignas(16) float weight_unit[Columns];               ///< 2^(kUnitShift - offset)
  alignas(16) float query_unit[Columns];                ///< what the head's FP16 query is to be multiplied by
  alignas(16) float rescale[kScoreGroups][Columns];     ///< of latents summed before these weights
  alignas(16) float lower_sums[kScoreGroups][Columns];  ///< of p summed before
  alignas(16) float sums[4 * kScoreGroups][Columns];
  alignas(16) float2 factors[Columns];  ///< of the summed latents: x, and y where keys are scaled
  alignas(16) SplitSum part[Columns];   ///< what the softmax has summed up
  alignas(8) uint64_t full[kSlots], ready[kSlots], empty[kSlots];
  /// Weights of a warpgroup of scores: they and the references after them can be read; they have been.
  alignas(8) uint64_t written[kScoreGroups], read[kScoreGroups];
  uint32_t raised[kScoreGroups];  ///< whether the group's last tile has raised references; else rescale and lower_sums
                                  ///< are void
};

/// A CTA's share of the work. Groups of heads lie side by side: they read the same rows at the same time.
struct Place {
  int group, split, row;
  int head, heads;  ///< first, number

  /// In the grid.
  __device__ __forceinline__ int cta(const ManyHeadsPlan& plan) const {
    return (row * plan.splits + split) * plan.groups + group;
  }
};

__device__ __forceinline__ Place place_of(const ManyHeadsArgs& args) {
  const int group = int(blockIdx.x), head = group * args.plan.group_heads;
  return {group, int(blockIdx.y), int(blockIdx.z), head, min(args.plan.group_heads, args.query.heads - head)};
}

/// Its keys.
struct Work {
  int first;  ///< in the row's list
  int keys;   ///< from there to its end
  int tiles;
};

/// Where the row has `valid` keys.
__device__ __forceinline__ Work work_of(const ManyHeadsArgs& args, const Place& place, int valid) {
  const int tiles = int(uint32_t(valid + kManyHeadsTile - 1) / kManyHeadsTile);
  const int first = args.plan.first_tile(tiles, place.split);
  return {first * kManyHeadsTile, valid - first * kManyHeadsTile, args.plan.first_tile(tiles, place.split + 1) - first};
}

/// Powers of two for FP16: `factor` brings the largest magnitude, whose FP32 bits are given, to 2^14; `unit` undoes it.
struct HalfUnit {
  float factor, unit;

  __device__ __forceinline__ explicit HalfUnit(uint32_t largest) {
    const int exponent = int(max(largest >> 23, 15u));
    factor = power_of_two(127 + 141 - exponent);
    unit = power_of_two(exponent - 14);
  }
};

/// 2^(from - to), 1 where they are equal, infinities included.
__device__ __forceinline__ float step_down(float from, float to) { return from == to ? 1.0f : exp2_approx(from - to); }

/// Products `First` to `Last` of fragments that are made on the way: raw words are loaded kPairsAhead of them, kAtOnce
/// are made and then issued, by `multiply(product, fragment)`, and up to `Open` lie in registers, those from
/// `FirstOpen` on. One range goes on where another has ended.
template <int First, int Last, int FirstOpen, int Pairs, class Fragments, int Open, class Multiply>
__device__ __forceinline__ void multiply_made(Fragments& fragments, uint32_t (&a)[Open][4], const Multiply& multiply) {
  if constexpr (First == 0) {
    for (int pair = 0; pair < kPairsAhead; ++pair) fragments.fetch(pair);
  }
#pragma unroll
  for (int first = First; first < Last; first += kAtOnce) {
    if (first - FirstOpen >= Open) wgmma_wait<Open / kAtOnce - 1>();  // those that read what is made now
#pragma unroll
    for (int product = first; product < first + kAtOnce; ++product) {
      fragments.make(product / 2, product % 2, a[product % Open]);
    }
    wgmma_fence();
#pragma unroll
    for (int product = first; product < first + kAtOnce; ++product) multiply(product, a[product % Open]);
    wgmma_commit();
#pragma unroll
    for (int pair = first / 2 + kPairsAhead; pair < (first + kAtOnce) / 2 + kPairsAhead; ++pair) {
      if (pair < Pairs) fragments.fetch(pair);
    }
  }
}

/// What the math warpgroups have in common. Accumulators are indexed [4 j + 2 i + e]: row 8 i + r of the warp's 16,
/// head 8 j + 2 c + e (r, c = lane / 4, lane % 4); what belongs to a head alone [2 j + e].
template <class Layout, int Columns>
struct Tiles {
  using S = Shared<Layout, Columns>;
  using F = RowOperands<Layout>;
  using F16 = WgmmaShape<Operands::kF16, Columns>;
  static constexpr int kAccumulators = Columns / 2;
  static constexpr int kHeads = Columns / 4;

  S& shared;
  const Work& work;
  const Lane lane;
  const uint32_t base;  ///< address of `shared`; one register for all that is addressed by number

  __device__ __forceinline__ Tiles(S& shared, const Work& work, Lane lane)
      : shared(shared), work(work), lane(lane), base(fixed_shared_address(&shared)) {}

  __device__ __forceinline__ int head_of(int h) const { return h / 2 * 8 + 2 * lane.column() + h % 2; }
  /// A head's values of [Columns] in shared memory.
  __device__ __forceinline__ void load_heads(const float* from, float (&to)[kHeads]) const {
#pragma unroll
    for (int j = 0; j < kHeads / 2; ++j) {
      const float2 both = *reinterpret_cast<const float2*>(from + head_of(2 * j));
      to[2 * j] = both.x, to[2 * j + 1] = both.y;
    }
  }
  static __device__ __forceinline__ uint32_t slot_of(int nth) { return uint32_t(nth % S::kSlots); }
  __device__ __forceinline__ uint32_t rows_of(uint32_t slot) const {
    return base + uint32_t(offsetof(S, slots)) + slot * S::kSlotBytes;
  }
  __device__ __forceinline__ uint32_t table_of(uint32_t slot) const {
    return base + uint32_t(offsetof(S, tables)) + slot * S::kTableBytes;
  }
};

}  // namespace dsacore::cuda::many
