// The index front (steps 6 to 8, and step 1 where it starts from the packed row) as one kernel.
//
// Two numbers first: W_IQ of 32 heads x 128 x 1536 is 12.6 MB, 2.9 us at 4.4 TB/s; 64 rows are 0.8 GFLOP, 1 us. Bytes
// bound it, and the rest is latency: hence all weights (or as many as fit) are requested before the wait for earlier
// kernels, by 128 CTAs at once, in at most 113 KB of shared memory a CTA, so that every cluster has a place and the
// next kernel one beside it; and everything that depends on the shape but not on the step is a constant of the
// instance.
//
// A cluster of four CTAs computes an index head (128 rows of W_IQ), each CTA over a quarter of the columns:
//   1. the activations of up to `Tokens` rows (index_projection_activations.cuh);
//   2. wgmma, weights as A (64 rows a warpgroup), tokens as N, from a ring of weight tiles of 64 columns;
//   3. the sums go to the CTAs that finish the tokens (index_projection_exchange.cuh).
// Further clusters insert the keys. More than 61 heads do not fit at once: then a cluster has two heads in turn.
#pragma once

#include "backends/cuda/index_projection_activations.cuh"
#include "backends/cuda/index_projection_exchange.cuh"
#include "backends/cuda/index_projection_place.cuh"

namespace dsacore::cuda {

/// The sums of this CTA's part for one head, 64 rows of W_IQ a warpgroup. Requests what the ring had no room for.
template <int Tokens, int PartBlocks, class Activations>
__device__ __forceinline__ void multiply_part(float (&sums)[Tokens / 2], const FrontArguments& a,
                                              const FrontPlace<Tokens, PartBlocks>& place,
                                              const Activations& activations, int head, uint32_t parity) {
  using Shape = FrontShape<Tokens, PartBlocks>;
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
    if (chunk % kBlockChunks == 0 && chunk >= place.chunks()) break;
    activations.wait(chunk);
    if (chunk % Shape::kBarrierChunks == 0) place.weights_full(chunk).wait(parity);
    multiply_chunk<Tokens>(sums, place.weight_tile(chunk), place.activation_tile(chunk), chunk > 0);
    const int next = chunk - 1 + Shape::kStages;  // takes the place of the chunk before
    const bool refill = chunk > 0 && next < Shape::kChunks, leave = Shape::kOverlay && chunk == Shape::kChunks - 2;
    if (refill || leave) wgmma_wait<1>();
    if (refill) {
      barrier_meet(1 + place.warpgroup, kWarpgroup);  // all four warps have done with the chunk before
      if (place.first_warp && elect_one()) place.request_weights(a, head, next, next + 1);
    }
    if (leave) cluster_arrive_relaxed();  // the others may write to the inbox
  }
  wgmma_wait<0>();
  wgmma_settle(sums);
  if (Shape::kOverlay && place.chunks() != Shape::kChunks) cluster_arrive_relaxed();
}

template <int Tokens, int PartBlocks, template <int, int> class Activations>
__device__ __forceinline__ void project_heads(const FrontArguments& a, std::byte* shared) {
  using Shape = FrontShape<Tokens, PartBlocks>;
  const FrontPlace<Tokens, PartBlocks> place(a, shared);
  place.init_barriers();
  cluster_arrive_relaxed();
  const auto request = [&](int head, int begin, int end) {
    if (!place.first_warp || !elect_one()) return;
    place.request_weights(a, head, begin, end);
    if (begin == 0) place.prefetch_weights(a, head, end);
  };
  constexpr int kEarlyStages = Activations<Tokens, PartBlocks>::kEarlyStages;
  request(place.cluster, 0, kEarlyStages);
  Activations<Tokens, PartBlocks> activations(a, place);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  cluster_wait();  // the others run: their shared memory may be written

  uint32_t tile = 0, pass = 0;
  for (int first = 0; first < a.rows; first += Tokens, ++tile) {
    const int live = min(Tokens, a.rows - first);
    activations.load(first, live, tile & 1);
    if (kEarlyStages < Shape::kStages) request(place.cluster, kEarlyStages, Shape::kStages);
    activations.make();
    for (int head = place.cluster; head < a.heads; head += a.head_clusters, ++pass) {
      const Exchange<Tokens, PartBlocks> exchange(a, place, first, live, head);
      float sums[Tokens / 2];
      multiply_part<Tokens, PartBlocks>(sums, a, place, activations, head, pass & 1);
      if (!Shape::kOverlay && pass > 0) cluster_arrive_relaxed();
      if (Shape::kOverlay || pass > 0) cluster_wait();  // the others' inboxes are free
      exchange.send(sums);
      exchange.finish(sums, pass & 1);

      const bool same_tile = head + a.head_clusters < a.heads;
      if (same_tile || first + Tokens < a.rows) {
        __syncthreads();  // the inbox has been read, and all warps have done with the weights
        if (same_tile) {
          request(head + a.head_clusters, 0, Shape::kStages);
        } else {
          request(place.cluster, 0, kEarlyStages);
        }
      }
    }
  }
}

__device__ __forceinline__ void insert_keys(const FrontArguments& a) {
  const int lane = int(threadIdx.x) % 32;
  const KeyInsert::Norm norm = a.keys.norm(lane);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int block = int(blockIdx.x) - a.head_clusters * kParts;
  const int step = a.key_clusters * kParts * kFrontWarps;
  for (int row = block * kFrontWarps + int(threadIdx.x) / 32; row < a.rows; row += step) a.keys.insert(row, norm, lane);
}

template <int Tokens, int PartBlocks, template <int, int> class Activations>
__global__ void __launch_bounds__(kFrontThreads, 2) index_front(const __grid_constant__ FrontArguments a) {
  extern __shared__ __align__(1024) std::byte shared[];
  if (int(blockIdx.x) < a.head_clusters * kParts) {
    project_heads<Tokens, PartBlocks, Activations>(a, shared);
  } else {
    insert_keys(a);
  }
}

}  // namespace dsacore::cuda
