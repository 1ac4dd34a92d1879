// Sparse core for many heads: the kernel that brings together what CTAs that share a row's keys have left.
//
// A part's latents are FP16 in units of their own, one for every 64, which brings the largest to 2^14, so that their
// rounding is an eighth of that of the result. They lie in the order of the accumulators: a lane writes eight of a head
// at once. All go through L2, 1 KB a head and part there and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/half_warp.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"

namespace dsacore::cuda::many {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeHeads = kMergeThreads / 64;  ///< of a CTA; a warp has half of a head's latents

/// Adds the parts of a row in their order; loads of `AtOnce` are under way.
template <int AtOnce, class Layout>
__global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ ManyHeadsArgs args) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), row = int(blockIdx.y);
  const int head = int(blockIdx.x) * kMergeHeads + warp / 2, half = warp % 2;
  if (head >= args.query.heads) return;
  const ManyHeadsPlan& plan = args.plan;
  const Lane place = {lane / 8, lane % 8 * 4};  // of the lane that has left these latents
  const int group = head / plan.group_heads, splits = plan.splits;
  const int first = (row * splits * plan.groups + group) * plan.columns + head % plan.group_heads;
  const int stride = plan.groups * plan.columns;  // heads from a part to the next
  const int unit = first * kPartUnits + kPartUnits / 2 * half + place.warp;
  const uint4* latents = args.parts.latents + (int64_t(unit) * 8 + place.row());
  const float* units = args.parts.units + unit;

  uint4 words[AtOnce];
  float factors[AtOnce];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      if (from + i >= splits) break;
      words[i] = __ldcg(latents + (from + i) * stride * kPartUnits * 8);
      factors[i] = __ldcg(units + (from + i) * stride * kPartUnits);
    }
  };
  float2 part = {-INFINITY, 0};  // largest and sum of part `lane`; without keys it has left nothing else
  if (lane < splits) part = __ldcg(reinterpret_cast<const float2*>(args.parts.sums + first + lane * stride));
  load(0);

  const auto other_half = [](float x) { return __shfl_xor_sync(0xFFFFFFFFu, x, 16); };
  const float counted = part.y != 0 ? part.x : -INFINITY, largest = half_warp_max(fmaxf(counted, other_half(counted)));
  const float share = part.y != 0 ? part.y * step_down(part.x, largest) : 0;
  const float total = half_warp_sum(share + other_half(share)), weight = total != 0 ? share / total : 0;
  float2 sums[4] = {};
  for (int from = 0; from < splits; from += AtOnce) {
    if (from > 0) load(from);
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      if (from + i >= splits) break;
      const float own = __shfl_sync(0xFFFFFFFFu, weight, from + i);
      if (own == 0) continue;
      const float factor = own * factors[i];
      const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[block]));
        sums[block].x = fmaf(factor, pair.x, sums[block].x);
        sums[block].y = fmaf(factor, pair.y, sums[block].y);
      }
    }
  }
  BFloat16* to = args.latent.row(row, head) + kLatent / kLatentGroups * half;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    *reinterpret_cast<__nv_bfloat162*>(to + RowOperands<Layout>::latent_of(block, place, 0)) =
        __floats2bfloat162_rn(sums[block].x * args.latent_scale, sums[block].y * args.latent_scale);
  }
  if (half == 0 && lane == 0) args.lse(row, head) = total != 0 ? natural_lse(largest, total) : -INFINITY;
}

}  // namespace dsacore::cuda::many
