// Sparse core for many heads: the merge of a row's splits, a CTA a head. Bound by the parts' way through L2.
#pragma once

#include <cuda_bf16.h>

#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/sparse_core_many.h"

namespace dsacore::cuda {

inline constexpr int kMergeThreads = kLatent / 4;  ///< that read a split, four latents each
inline constexpr int kMergeSplits = 8;             ///< that a reader holds in flight

/// Adds in split order within a reader and then over the readers: the bits depend on the plan alone.
inline __global__ void __launch_bounds__(4 * kMergeThreads) merge_splits(const __grid_constant__ ManyHeadsArgs args) {
  __shared__ float4 others[3][kMergeThreads];
  const int lane = int(threadIdx.x) % 32, reader = int(threadIdx.x) / kMergeThreads, at = int(threadIdx.x) % kMergeThreads;
  const int64_t head = blockIdx.x, row = blockIdx.y;
  const int splits = args.plan.splits;
  const int64_t first = (row * args.query.heads + head) * splits;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const SplitSum mine = lane < splits ? args.part_sums[first + lane] : SplitSum{0, 0};
  float largest = mine.sum != 0 ? mine.largest : -INFINITY;  // NaN counts
  for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
  float weight = mine.sum != 0 ? mine.sum * exp2f(mine.largest - largest) : 0;
  float sum = weight;
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
  weight = sum != 0 ? weight / sum : 0;

  float4 parts[kMergeSplits], latent = {0, 0, 0, 0};
  float weights[kMergeSplits];
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i) {
    const int split = reader * kMergeSplits + i;
    weights[i] = __shfl_sync(0xFFFFFFFFu, weight, split);
    parts[i] = {0, 0, 0, 0};
    if (weights[i] != 0) parts[i] = reinterpret_cast<const float4*>(args.parts + (first + split) * kLatent)[at];
  }
#pragma unroll
  for (int i = 0; i < kMergeSplits; ++i) {
    latent.x = fmaf(weights[i], parts[i].x, latent.x);
    latent.y = fmaf(weights[i], parts[i].y, latent.y);
    latent.z = fmaf(weights[i], parts[i].z, latent.z);
    latent.w = fmaf(weights[i], parts[i].w, latent.w);
  }
  if (splits > kMergeSplits) {
    if (reader > 0) others[reader - 1][at] = latent;
    __syncthreads();
    if (reader > 0) return;
    for (int i = 0; i < (splits - 1) / kMergeSplits; ++i) {
      latent.x += others[i][at].x, latent.y += others[i][at].y, latent.z += others[i][at].z, latent.w += others[i][at].w;
    }
  }
  const float scale = args.latent_scale;
  const __nv_bfloat162 low = __floats2bfloat162_rn(latent.x * scale, latent.y * scale);
  const __nv_bfloat162 high = __floats2bfloat162_rn(latent.z * scale, latent.w * scale);
  uint2 bits;
  bits.x = reinterpret_cast<const uint32_t&>(low);
  bits.y = reinterpret_cast<const uint32_t&>(high);
  reinterpret_cast<uint2*>(args.latent.row(row, head))[at] = bits;
  if (at == 0) args.lse(row, head) = sum != 0 ? natural_lse(largest, sum) : -INFINITY;
}

}  // namespace dsacore::cuda
