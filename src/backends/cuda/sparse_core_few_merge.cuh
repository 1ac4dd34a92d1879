// Sparse core for few heads: from the parts of a row's splits to its latent and lse, in the value kernel that reads
// them or in a kernel of its own (sparse_core_few.cu).
// parts -> latents of a chunk of 64, in registers and in memory; lse
//
// All loads of a thread are under way together, so that the merge takes one read from L2. FP64 is in one place: a
// head's lse from its largest logit, so that logits of 10^4 cost it nothing.
#pragma once

#include "backends/cuda/half_warp.cuh"
#include "backends/cuda/ptx/convert.cuh"
#include "backends/cuda/sparse_core_few.h"

namespace dsacore::cuda {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeUnits = kMergeThreads / 16;  ///< half warps
inline constexpr int kMergeRows = 16;                   ///< of a CTA, at most
inline constexpr int kChunk = 64;                       ///< latents that a CTA merges
inline constexpr int kChunks = kLatent / kChunk;
inline constexpr int kUnitSplits = 8;  ///< that a half warp adds up, at most

struct MergeArgs {
  Parts parts;
  View<const int32_t, 1> valid;
  View<BFloat16, 3> latent;  ///< out
  View<float, 2> lse;        ///< out
  int rows, heads;
  int splits, split_keys;
  int helper_bits;  ///< log2 of the half warps of a row
  int topk;
  float scale;    ///< of logits
  float k_scale;  ///< of the latent

  /// Rows of a head that a CTA merges, or heads of neighbouring rows.
  DSACORE_HD int cta_rows() const { return kMergeRows >> helper_bits; }
};

/// Of the latents that a half warp merges.
struct MergePlace {
  int row, head;
};

/// Half warps of a row, as a power of two: none has more than 8 splits, and with few rows of few heads as many as there
/// are. Those past the last row repeat it.
constexpr int merge_helper_bits(int rows, int heads, int splits) {
  int bits = heads > 16 ? 0 : rows == 1 ? 4 : rows == 2 ? 3 : rows <= 4 ? 2 : rows <= 8 ? 1 : 0;
  while (kUnitSplits << bits < splits) ++bits;
  return bits;
}

/// The merge of what the core left in its scratch for these arguments.
inline MergeArgs merge_args(const SparseCoreArgs& core, std::byte* scratch) {
  const int rows = int(core.latent.extent(0)), topk = int(core.topk_rows.extent(1));
  const FewHeadsPlan plan = few_heads_plan(rows, core.query.heads, topk);
  return {.parts = Parts::in(scratch, rows, plan.splits, core.query.heads),
          .valid = core.valid,
          .latent = core.latent,
          .lse = core.lse,
          .rows = rows,
          .heads = core.query.heads,
          .splits = plan.splits,
          .split_keys = plan.split_keys(),
          .helper_bits = merge_helper_bits(rows, core.query.heads, plan.splits),
          .topk = topk,
          .scale = core.model->attention_scale(),
          .k_scale = core.model->k_scale};
}

struct MergeShared {
  alignas(16) float weights[kMergeUnits][kMaxSplits];
  alignas(16) float sums[kMergeUnits][kChunk];
};

/// Merges latents `chunk * 64` and on of `cta_rows()` rows or heads, by a whole CTA: the i-th is `place_of(i)`, past
/// the last row for none. Returns four of the one numbered threadIdx.x / 16. A half warp adds up
/// to `UnitSplits`.
template <int UnitSplits, class PlaceOf>
__device__ __forceinline__ uint2 merge_chunk(MergeShared& shared, const MergeArgs& args, int chunk, PlaceOf place_of) {
  const int unit = int(threadIdx.x) / 16, lane = int(threadIdx.x) % 16;
  const int helpers = 1 << args.helper_bits, helper = unit & (helpers - 1);
  const MergePlace place = place_of(unit >> args.helper_bits);
  const int row = min(place.row, args.rows - 1), head = place.head;
  const int64_t first_part = int64_t(row) * args.splits * args.heads + head;
  const auto* latents = reinterpret_cast<const float4*>(args.parts.latents + first_part * kLatent + chunk * kChunk);
  const int list = row * args.heads + head, group = list * kKeyGroups + chunk * kChunk / kGroupLatents;
  constexpr int kLaneSplits = kMaxSplits / 16;
  float4 part[UnitSplits];
  float2 softmax[kLaneSplits];  // largest logit, sum
  float weight[kLaneSplits];    // the unit, at first
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    const int split = lane + 16 * j;
    if (split >= args.splits) continue;
    softmax[j] = __ldcg(reinterpret_cast<const float2*>(args.parts.softmax) + (list * args.splits + split));
    weight[j] = __ldcg(args.parts.units + (group * args.splits + split));
  }
#pragma unroll
  for (int k = 0; k < UnitSplits; ++k) {
    const int split = helper + (k << args.helper_bits);
    if (split < args.splits) part[k] = __ldcg(latents + split * args.heads * (kLatent / 4) + lane);
  }
  const int valid = min(args.valid(row), args.topk);
  // Splits without keys have left nothing.
  const auto counts = [&](int split) { return split < args.splits && split * args.split_keys < valid; };

  float largest = -HUGE_VALF, sum = 0;
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    if (!counts(lane + 16 * j)) softmax[j] = make_float2(-HUGE_VALF, 0);
    largest = fmaxf(largest, softmax[j].x);
  }
  largest = half_warp_max(largest);
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    const float share = exp2_approx((softmax[j].x - largest) * (args.scale * kLog2E));
    sum = fmaf(softmax[j].y, counts(lane + 16 * j) ? share : 0.0f, sum);
    weight[j] *= share;
  }
  sum = half_warp_sum(sum);
  // Normalised first: units may be so large that a sum of products alone would overflow.
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    if (counts(lane + 16 * j)) shared.weights[unit][lane + 16 * j] = __fdividef(weight[j], sum);
  }
  __syncwarp();
  float4 value = {};
#pragma unroll
  for (int k = 0; k < UnitSplits; ++k) {
    const int split = helper + (k << args.helper_bits);
    if (!counts(split)) continue;
    const float w = shared.weights[unit][split];
    value.x = fmaf(w, part[k].x, value.x);
    value.y = fmaf(w, part[k].y, value.y);
    value.z = fmaf(w, part[k].z, value.z);
    value.w = fmaf(w, part[k].w, value.w);
  }
  // Half warps of one row: first the two of a warp, then the warps in order.
  if (args.helper_bits > 0) {
    value.x += __shfl_xor_sync(0xFFFFFFFFu, value.x, 16);
    value.y += __shfl_xor_sync(0xFFFFFFFFu, value.y, 16);
    value.z += __shfl_xor_sync(0xFFFFFFFFu, value.z, 16);
    value.w += __shfl_xor_sync(0xFFFFFFFFu, value.w, 16);
  }
  *reinterpret_cast<float4*>(&shared.sums[unit][lane * 4]) = value;
  if (chunk == 0 && helper == 0 && lane == 0) {
    args.lse(row, head) = valid > 0 ? float(double(largest) * double(args.scale) + double(__logf(sum))) : -HUGE_VALF;
  }
  __syncthreads();
  if (unit >= args.cta_rows()) return {};
  const MergePlace own = place_of(unit);
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kMergeUnits; i += 2) {
    if (i >= helpers) break;
    const float4 more = *reinterpret_cast<const float4*>(&shared.sums[(unit << args.helper_bits) + i][lane * 4]);
    total.x += more.x;
    total.y += more.y;
    total.z += more.z;
    total.w += more.w;
  }
  const uint2 rounded = {pack_bf16(total.x * args.k_scale, total.y * args.k_scale),
                         pack_bf16(total.z * args.k_scale, total.w * args.k_scale)};
  if (own.row < args.rows) {
    *reinterpret_cast<uint2*>(args.latent.row(own.row, own.head) + chunk * kChunk + lane * 4) = rounded;
  }
  return rounded;
}

}  // namespace dsacore::cuda
