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
// product takes 31 clocks in all. Before the tiles a CTA takes 7700 clocks for the number of keys and the query and,
// after them, 2600 for the latents' way out, more where parts of a row are brought together.
//
// Warps: two warpgroups make the weights of values, tile by tile in turns; two sum up latents, 256 each; the last one
// has two warps that gather rows (bulk copies into slots of 16) and two that prepare their scales. They meet at
// mbarriers alone: rows `full`, tables `ready`, weights `written`, weights `read`, rows `empty`. Room for rows is what
// there must be enough of: two tiles are scored while one is weighed and one arrives.
#pragma once

#include <cuda_bf16.h>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sparse_core_many_inputs.cuh"
#include "backends/cuda/sparse_core_many_latents.cuh"
#include "backends/cuda/sparse_core_many_scores.cuh"

namespace dsacore::cuda::many {

// ---- output ----

/// Of a row in one part: rounds.
struct Rounded {
  BFloat16* to;  ///< of the CTA's first head
  int heads;
  float scale;

  __device__ __forceinline__ void operator()(int head, int latent, float2 pair) const {
    if (head >= heads) return;
    *reinterpret_cast<__nv_bfloat162*>(to + head * kLatent + latent) =
        __floats2bfloat162_rn(pair.x * scale, pair.y * scale);
  }
};

/// Of a row in parts: FP32 latents for the cluster, where the rows were.
template <class Layout, int Columns>
struct LaidOut {
  Shared<Layout, Columns>& shared;

  __device__ __forceinline__ void operator()(int head, int latent, float2 pair) const {
    *reinterpret_cast<float2*>(shared.latents() + head * Shared<Layout, Columns>::kLatentPitch + latent) = pair;
  }
};

/// A row in one part.
template <class Layout, int Columns>
__device__ __forceinline__ void write_rounded(Latents<Layout, Columns>& latents, const ManyHeadsArgs& args,
                                              const Work& work, int thread) {
  latents.finish(Rounded{args.latent.row(work.row, work.head), work.heads, args.latent_scale});
  if (thread < work.heads) {
    const SplitSum sum = latents.shared.part[thread];
    args.lse(work.row, work.head + thread) = natural_lse(sum.largest, sum.sum);
  }
}

/// What each part of the row counts, of its heads: into the place of the query. Part 0 writes the lse.
template <class Layout, int Columns>
__device__ __forceinline__ void weigh_parts(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                            const Work& work, int thread) {
  const int parts = args.plan.splits;
  auto* all = reinterpret_cast<SplitSum*>(shared.query);  // [parts][Columns]
  const uint32_t mine = shared_address(shared.part);
  for (int i = thread; i < parts * Columns; i += kLatentThreads) {
    const float2 sum =
        load_from_cluster2(address_in(mine + uint32_t(i % Columns * sizeof(SplitSum)), uint32_t(i / Columns)));
    all[i] = {sum.x, sum.y};
  }
  barrier_meet(kLatents, kLatentThreads);
  if (thread < Columns) {
    float largest = -INFINITY, sum = 0;
    for (int part = 0; part < parts; ++part) {
      const SplitSum& s = all[part * Columns + thread];
      if (s.sum != 0) largest = fmaxf(largest, s.largest);  // NaN counts
    }
    for (int part = 0; part < parts; ++part) {
      SplitSum& s = all[part * Columns + thread];
      s.sum = s.sum != 0 ? s.sum * step_down(s.largest, largest) : 0;
      sum += s.sum;
    }
    for (int part = 0; part < parts; ++part) {
      SplitSum& s = all[part * Columns + thread];
      s.sum = sum != 0 ? s.sum / sum : 0;
    }
    if (work.split == 0 && thread < work.heads) {
      args.lse(work.row, work.head + thread) = sum != 0 ? natural_lse(largest, sum) : -INFINITY;
    }
  }
  barrier_meet(kLatents, kLatentThreads);
}

/// Adds parts of a row in their order, `Parts` at a time, for the CTA's share of heads and latents, and rounds once.
/// Loads from the cluster take some 500 clocks: as many are under way as there are registers for.
template <int Parts, class Layout, int Columns>
__device__ __forceinline__ void add_parts(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args, const Work& work,
                                          int thread) {
  using S = Shared<Layout, Columns>;
  constexpr int kQuads = kLatent / 4, kAtOnce = 8 / Parts;
  const int parts = args.plan.splits;
  const auto* all = reinterpret_cast<const SplitSum*>(shared.query);
  const uint32_t here = shared_address(shared.latents());
  const float scale = args.latent_scale;
  const int quads = work.heads * kQuads, last = quads * (work.split + 1) / parts;
  for (int first = quads * work.split / parts + thread; first < last; first += kAtOnce * kLatentThreads) {
    float4 sum[kAtOnce] = {};
    for (int from = 0; from < parts; from += Parts) {
      float4 value[kAtOnce][Parts];
      float weight[kAtOnce][Parts];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kLatentThreads, head = at / kQuads;
        const uint32_t address = here + uint32_t((head * S::kLatentPitch + at % kQuads * 4) * 4);
#pragma unroll
        for (int j = 0; j < Parts; ++j) {
          weight[i][j] = from + j < parts && at < last ? all[(from + j) * Columns + head].sum : 0;
          value[i][j] = {0, 0, 0, 0};
          if (weight[i][j] != 0) value[i][j] = load_from_cluster4(address_in(address, uint32_t(from + j)));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < Parts; ++j) {
          sum[i].x = fmaf(weight[i][j], value[i][j].x, sum[i].x);
          sum[i].y = fmaf(weight[i][j], value[i][j].y, sum[i].y);
          sum[i].z = fmaf(weight[i][j], value[i][j].z, sum[i].z);
          sum[i].w = fmaf(weight[i][j], value[i][j].w, sum[i].w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kLatentThreads;
      if (at >= last) break;
      auto* to = reinterpret_cast<__nv_bfloat162*>(args.latent.row(work.row, work.head)) + 2 * at;
      const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum[i].x * scale, sum[i].y * scale),
                                       __floats2bfloat162_rn(sum[i].z * scale, sum[i].w * scale)};
      *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(pairs);
    }
  }
}

/// A row in parts, each CTA of the cluster its share.
template <class Layout, int Columns>
__device__ __forceinline__ void write_parts(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                            const Work& work, int thread) {
  const int parts = args.plan.splits;
  parts > 1 ? cluster_barrier() : barrier_meet(kLatents, kLatentThreads);
  weigh_parts(shared, args, work, thread);
  if (parts <= 2) {
    add_parts<2>(shared, args, work, thread);
  } else if (parts <= 4) {
    add_parts<4>(shared, args, work, thread);
  } else {
    add_parts<8>(shared, args, work, thread);
  }
  if (parts > 1) cluster_barrier();  // until then others may read here
}

template <class Layout, int Columns>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ ManyHeadsArgs args) {
  using S = Shared<Layout, Columns>;
  extern __shared__ __align__(1024) std::byte memory[];
  S& shared = *reinterpret_cast<S*>(memory);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < S::kSlots; ++slot) {
      Barrier{shared_address(&shared.full[slot])}.init(1);
      Barrier{shared_address(&shared.ready[slot])}.init(32);
      Barrier{shared_address(&shared.empty[slot])}.init(kLatentThreads / 32);
    }
    for (int group = 0; group < kScoreGroups; ++group) {
      Barrier{shared_address(&shared.written[group])}.init(4);
      Barrier{shared_address(&shared.read[group])}.init(kLatentThreads / 32);
    }
    publish_barriers();
    shared.raised[0] = shared.raised[1] = 0;
  }
  for (int i = int(threadIdx.x); i < Columns; i += kThreads) {
    shared.largest[i] = kNoLogit;
    shared.offset[i] = -INFINITY;
    shared.weight_unit[i] = 1;
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();
  const Work work = work_of(args, int(blockIdx.x));
  const Lane place = {warp % 4, lane};
  if (warp < kMathWarps) {
    load_query(shared, args, work, warp, lane);
    fence_async_proxy();
    barrier_meet(kMath, kMathThreads);
  }
  if (warp < kScoreThreads / 32) {
    give_registers<kScoreRegisters>();
    if (work.tiles == 0) return;
    Scores<Layout, Columns> scores(shared, args, work, warp / 4, place);
    scores.run();
  } else if (warp < kMathWarps) {
    take_registers<kLatentRegisters>();
    const int thread = int(threadIdx.x) - kScoreThreads;
    if (work.tiles == 0) {
      if (thread < Columns) shared.part[thread] = {0, 0};
    } else {
      Latents<Layout, Columns> latents(shared, work, thread / 128, place);
      latents.run();
      barrier_meet(kMath, kMathThreads);  // sums are there, and nobody reads rows any more
      if (args.plan.splits == 1) return write_rounded(latents, args, work, thread);
      latents.finish(LaidOut<Layout, Columns>{shared});
    }
    write_parts(shared, args, work, thread);
  } else {
    give_registers<kOtherRegisters>();
    const int other = warp - kMathWarps;
    if constexpr (RowOperands<Layout>::kTableBytes == 0) {
      gather<kProducers + kHelpers>(shared, args, work, other, lane);
    } else if (other < kProducers) {
      gather<kProducers>(shared, args, work, other, lane);
    } else {
      prepare_scales(shared, work, other - kProducers, lane);
    }
  }
}

}  // namespace dsacore::cuda::many

namespace dsacore::cuda {

template <class Layout>
void ManyHeadsKernel<Layout>::prepare() {
  static_assert(sizeof(many::Shared<Layout, 48>) <= kWholeOfShared &&
                sizeof(many::Shared<Layout, 24>) <= kWholeOfShared);
  allow_shared(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>), true);
  allow_shared(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>), true);
}

template <class Layout>
void ManyHeadsKernel<Layout>::launch(const ManyHeadsArgs& args, const Workspace& workspace) {
  const auto enqueue = [&](auto kernel, size_t shared_bytes) {
    const LaunchShape shape = {.grid = unsigned(args.plan.ctas(int(args.valid.extent(0)))),
                               .block = many::kThreads,
                               .shared_bytes = shared_bytes,
                               .cluster = args.plan.splits};
    cuda::launch(kernel, shape, workspace, args);
  };
  args.plan.columns == 24 ? enqueue(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>))
                          : enqueue(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>));
}

}  // namespace dsacore::cuda
