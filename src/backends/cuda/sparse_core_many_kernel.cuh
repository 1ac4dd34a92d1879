// Sparse core for 17 to 128 heads (it takes any number): one CTA attends with up to 48 heads of a row over a part of
// its keys, operands swapped: S^T[64 keys x N heads] = K Q^T, O^T[512 x N] += V^T P^T by wgmma, N a multiple of 8.
//
// What bounds it, in SM clocks for 64 keys and N = 48: the tensor cores 68 products of N / 2 = 1632. They reach that
// only with A in registers: from shared memory a product takes 16 + N / 4 = 28, all of it shared memory, to which a
// tile in FP16 would add 576 clocks of stores. So there is no such tile: math warps turn raw rows into fragments, keys
// and values each once a warpgroup (integer pipe 640), and shared memory works 1656 clocks, 328 of them for rows that
// arrive. 96 heads, 64 rows: 32 tiles x 1632 on 128 SMs = 26 us at 1980 MHz; the gather, read by two CTAs each, is 172
// MB from L2. Measured (H200, at the 1.81 GHz that it is left under this load), 64 rows: 64 us of fp8_ds_mla and 49 of
// fp8. fp8_ds_mla by clocks counted, which cost a tenth: of 6900 for a tile of one of the two warpgroups of scores,
// that take tiles in turns, 3100 are for 32 products with the loads and conversions before them, 830 for the scales and
// pe, 1900 for the softmax, 370 for rows; those of latents work 2900 of the 3450 that come to a tile. Nothing is full:
// a scheduler issues an instruction every other clock, and with four warpgroups that convert what they multiply, a
// product takes 31 clocks in all. At few rows latency is what counts. 8 rows of 96 heads, a row in eight parts, four
// tiles a CTA: after the wait for earlier kernels the first rows are there at 4350 clocks, the weights of their values
// at 11800 (4000 of them to find references), the last latents are summed up at 22600 and left at 25800. From there to
// the end of the merge (sparse_core_many_merge.cuh) it is 3.1 us.
//
// Warps: two warpgroups make the weights of values, tile by tile in turns; two sum up latents, 256 each; the last one
// has two warps that gather rows (bulk copies into slots of 16) and two that prepare their scales. They meet at
// mbarriers alone: rows `full`, tables `ready`, weights `written`, weights `read`, rows `empty`. Room for rows is what
// there must be enough of: two tiles are scored while one is weighed and one arrives.
#pragma once

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sparse_core_many_inputs.cuh"
#include "backends/cuda/sparse_core_many_latents.cuh"
#include "backends/cuda/sparse_core_many_merge.cuh"
#include "backends/cuda/sparse_core_many_scores.cuh"

namespace dsacore::cuda::many {

/// What heads sum up to, for the merge or as the row's lse.
template <class Layout, int Columns>
__device__ __forceinline__ void write_sum(const Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                          const Place& place, int head) {
  if (head >= place.heads) return;
  const SplitSum sum = shared.part[head];
  if (args.plan.splits > 1) {
    args.parts.sums[place.cta(args.plan) * Columns + head] = sum;
  } else {
    args.lse(place.row, place.head + head) = sum.sum != 0 ? natural_lse(sum.largest, sum.sum) : -INFINITY;
  }
}

template <class Layout, int Columns>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ ManyHeadsArgs args) {
  using S = Shared<Layout, Columns>;
  extern __shared__ __align__(1024) std::byte memory[];
  S& shared = *reinterpret_cast<S*>(memory);
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
  if (threadIdx.x < S::kSlots) {
    Barrier{shared_address(&shared.full[threadIdx.x])}.init(1);
    Barrier{shared_address(&shared.ready[threadIdx.x])}.init(32);
    Barrier{shared_address(&shared.empty[threadIdx.x])}.init(kLatentThreads / 32);
    if (threadIdx.x < kScoreGroups) {
      Barrier{shared_address(&shared.written[threadIdx.x])}.init(4);
      Barrier{shared_address(&shared.read[threadIdx.x])}.init(kLatentThreads / 32);
      shared.raised[threadIdx.x] = 0;
    }
    publish_barriers();
  }
  for (int i = int(threadIdx.x); i < Columns; i += kThreads) {
    shared.largest[i] = kNoLogit;
    shared.offset[i] = -INFINITY;
    shared.weight_unit[i] = 1;
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();
  const Place place = place_of(args);
  const int valid = args.valid(place.row);
  const Lane in_group = {int(threadIdx.x / 32 % 4), lane};
  if (warp < kMathWarps) {
    load_query(shared, args, place, warp, lane);
    fence_async_proxy();
    barrier_meet(kMath, kMathThreads);
  }
  if (warp < kScoreThreads / 32) {
    give_registers<kScoreRegisters>();
    const Work work = work_of(args, place, valid);
    if (work.tiles == 0) return;
    Scores<Layout, Columns> scores(shared, args, work, warp / 4, in_group);
    scores.run();
  } else if (warp < kMathWarps) {
    take_registers<kLatentRegisters>();
    const int thread = int(threadIdx.x) - kScoreThreads;
    const Work work = work_of(args, place, valid);
    if (work.tiles > 0) {
      Latents<Layout, Columns> latents(shared, work, thread / 128, in_group);
      latents.run();
      barrier_meet(kMath, kMathThreads);  // sums are there
      if (args.plan.splits > 1) {
        latents.leave(args.parts, place.cta(args.plan));
      } else {
        latents.write(args.latent.row(place.row, place.head), place.heads, args.latent_scale);
      }
    } else {
      if (thread < Columns) shared.part[thread] = {0, 0};
      if (args.plan.splits == 1) {
        auto* to = reinterpret_cast<uint4*>(args.latent.row(place.row, place.head));
        for (int i = thread; i < place.heads * kLatent / 8; i += kLatentThreads) to[i] = {};
      }
    }
    write_sum(shared, args, place, thread);
  } else {
    give_registers<kOtherRegisters>();
    const int other = warp - kMathWarps;
    if constexpr (RowOperands<Layout>::kTableBytes == 0) {
      gather<kProducers + kHelpers>(shared, args, place, valid, other, lane);
    } else if (other < kProducers) {
      gather<kProducers>(shared, args, place, valid, other, lane);
    } else {
      prepare_scales(shared, work_of(args, place, valid), other - kProducers, lane);
    }
  }
}

}  // namespace dsacore::cuda::many

namespace dsacore::cuda {

template <class Layout>
void ManyHeadsKernel<Layout>::prepare() {
  static_assert(sizeof(many::Shared<Layout, 48>) <= kWholeOfShared &&
                sizeof(many::Shared<Layout, 24>) <= kWholeOfShared);
  allow_shared(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>));
  allow_shared(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>));
}

template <class Layout>
void ManyHeadsKernel<Layout>::launch(const ManyHeadsArgs& args, const Workspace& workspace) {
  const int rows = int(args.valid.extent(0));
  const auto enqueue = [&](auto kernel, size_t shared_bytes) {
    const LaunchShape shape = {.grid = dim3(unsigned(args.plan.groups), unsigned(args.plan.splits), unsigned(rows)),
                               .block = many::kThreads,
                               .shared_bytes = shared_bytes};
    cuda::launch(kernel, shape, workspace, args);
  };
  args.plan.columns == 24 ? enqueue(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>))
                          : enqueue(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>));
  if (args.plan.splits == 1) return;
  const LaunchShape shape = {
      .grid = dim3(unsigned((args.query.heads + many::kMergeHeads - 1) / many::kMergeHeads), unsigned(rows)),
      .block = many::kMergeThreads};
  cuda::launch(args.plan.splits <= 4 ? many::merge<4, Layout> : many::merge<16, Layout>, shape, workspace, args);
}

}  // namespace dsacore::cuda
