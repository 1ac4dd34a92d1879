// Sparse core for few heads (1 to 16), step 11 of spec.md: attention of all heads over the selected cache rows.
//
// Two numbers, per row of 2048 keys and 12 heads: 1.34 MB of cache rows (656 bytes each), 53 MFLOP. Bound by memory by
// more than 5 to 1, so every byte is read once, as it lies in the cache: one bulk copy a row into a ring of tiles.
//
//   producers  4 warps   ids -> rows of a tile in shared memory
//   math       8 warps   logits | softmax | latents of a tile, a barrier between
//   merge                cluster by way of shared memory, clusters by way of memory (sparse_core_few_merge.cuh)
//
// FP64 is in one place: a head's lse from its largest logit, so that logits of 10^4 cost it nothing.
#pragma once

#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sparse_core_few_merge.cuh"

namespace dsacore::cuda {

/// Fetches this warp's share of every tile, and zeros where the last tile has no key: p is 0 there, and 0 * NaN is not.
template <KvFormat Format, int Keys>
__device__ __forceinline__ void produce_tiles(const FewHeadsArgs& args, const FewHeadsPlace& place, uint32_t ring, uint32_t full,
                                              uint32_t empty, int warp, int lane) {
  using F = FewHeadsFormat<Format>;
  constexpr int kShare = Keys / kProducerWarps;
  constexpr int kTileBytes = FewHeadsShared<Format, Keys>::kTileBytes;
  const int32_t* ids = args.topk_rows.row(place.row) + (place.group * args.plan.cluster + place.rank) * args.plan.split_keys();
  const bool elected = elect_one();
  const auto id_of = [&](int first) { return lane < kShare && first + lane < place.keys ? ids[first + lane] : 0; };
  int stage = 0;
  uint32_t parity = 1;
  int32_t id = id_of(warp * kShare);
  for (int first = warp * kShare; first - warp * kShare < place.keys; first += Keys) {
    const int32_t next_id = id_of(first + Keys);
    const int rows = min(max(place.keys - first, 0), kShare);
    const uint32_t to = ring + uint32_t(stage * kTileBytes + warp * kShare * F::kPitch);
    if (first >= args.stages * Keys) Barrier{empty + uint32_t(stage * 8)}.wait(parity);
    for (uint32_t at = to + uint32_t(rows * F::kPitch + lane * 16); at < to + uint32_t(kShare * F::kPitch); at += 32 * 16) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    __syncwarp();
    if (elected) Barrier{full + uint32_t(stage * 8)}.expect(uint32_t(rows * F::kRowBytes));
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int64_t row = __shfl_sync(kWholeWarp, id, i);
      if (elected && i < rows) {
        bulk_copy(to + uint32_t(i * F::kPitch), args.cache + row * F::kRowBytes, F::kRowBytes, Barrier{full + uint32_t(stage * 8)});
      }
    }
    id = next_id;
    if (++stage == args.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

/// All tiles of this CTA by one math warp.
template <KvFormat Format, int Keys>
__device__ __forceinline__ void attend_tiles(MathWarp<Format, Keys>& warp, const FewHeadsArgs& args, const FewHeadsPlace& place,
                                             const std::byte* ring, uint32_t full, uint32_t empty) {
  constexpr int kTileBytes = FewHeadsShared<Format, Keys>::kTileBytes;
  const uint32_t ring_at = fixed_shared_address(ring);
  int stage = 0;
  uint32_t parity = 0;
  for (int first = 0; first < place.keys; first += Keys) {
    const std::byte* tile = ring + stage * kTileBytes;
    uint32_t operands = ring_at + uint32_t(stage * kTileBytes);
    const auto release = [&] {
      __syncwarp();
      if (warp.lane == 0) Barrier{empty + uint32_t(stage * 8)}.arrive();
    };
    Barrier{full + uint32_t(stage * 8)}.wait(parity);
    if constexpr (FewHeadsFormat<Format>::kExpanded) {
      operands = warp.shared_at + uint32_t(kExpandedAt<Format, Keys>);
      if (first > 0) math_barrier();  // the tile before has been read
      expand_tile<Keys>(tile, warp.expanded, warp.warp * 32 + warp.lane);
      release();
      math_barrier();
    }
    warp.logits(tile, operands);
    math_barrier();
    warp.softmax(place.keys - first);
    math_barrier();
    warp.latents(operands);
    if constexpr (!FewHeadsFormat<Format>::kExpanded) release();
    if (++stage == args.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ FewHeadsPlace few_heads_place(const FewHeadsArgs& args, int topk) {
  const FewHeadsPlan& plan = args.plan;
  const int block = int(blockIdx.x), cluster = block >> args.cluster_bits;
  FewHeadsPlace place = {};
  place.rank = block & (plan.cluster - 1);
  place.group = cluster & (plan.groups - 1);
  place.row = cluster >> args.group_bits;
  const int valid = min(max(args.valid(place.row), 0), topk);
  const int keys = plan.split_keys(), cluster_keys = keys * plan.cluster;
  const int in_cluster = min(max(valid - place.group * cluster_keys, 0), cluster_keys);
  place.keys = min(max(in_cluster - place.rank * keys, 0), keys);
  // Quotients of at most 2048, which FP32 division rounds to the right side: a quotient of integers is a 1/keys away.
  place.active_ranks = int(__fdividef(float(in_cluster + keys - 1), float(keys)) + 0x1p-12f);
  place.active_groups = int(__fdividef(float(valid + cluster_keys - 1), float(cluster_keys)) + 0x1p-12f);
  return place;
}

template <KvFormat Format, int Keys>
__global__ void __launch_bounds__(kFewHeadsThreads, 2) few_heads_kernel(const __grid_constant__ FewHeadsArgs args) {
  using Shared = FewHeadsShared<Format, Keys>;
  extern __shared__ __align__(128) std::byte bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const std::byte* ring = bytes + kRingAt<Format, Keys>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const uint32_t shared_at = fixed_shared_address(&shared);
  const uint32_t full = shared_at + uint32_t(offsetof(Shared, full)), empty = shared_at + uint32_t(offsetof(Shared, empty));
  const Barrier received = {shared_at + uint32_t(offsetof(Shared, received))};
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      Barrier{full + uint32_t(8 * i)}.init(kProducerWarps);
      Barrier{empty + uint32_t(8 * i)}.init(kMathWarps);
    }
    received.init(1);
    publish_barriers();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const FewHeadsPlace place = few_heads_place(args, int(args.topk_rows.extent(1)));
  if (place.active_groups == 0 && place.group == 0) write_empty_row(args, place, int(threadIdx.x));
  if (place.active_ranks == 0) return;  // the whole cluster
  // The cluster's barrier says that all its CTAs can be sent to: that they have started, and have read their tiles where
  // what is sent lies over them.
  const bool over_tiles = args.received_at == 0, alone = args.plan.cluster == 1;
  if (!alone && !over_tiles) cluster_arrive();

  if (warp >= kMathWarps) {
    give_registers<24>();
    produce_tiles<Format, Keys>(args, place, shared_at + uint32_t(kRingAt<Format, Keys>), full, empty, warp - kMathWarps, lane);
    if (alone) return;
    if (over_tiles) cluster_arrive();
    cluster_wait();
    return;
  }
  take_registers<104>();
  const float exp2_scale = args.scale * 1.44269504088896340736f;
  const int received_at = over_tiles ? kExpandedAt<Format, Keys> : args.received_at;
  MathWarp<Format, Keys> math(shared, shared_at, warp, lane, exp2_scale);
  if (place.keys > 0) {
    math.query.load(args.query, place.row, math.group(), lane);
    attend_tiles(math, args, place, ring, full, empty);
  }
  if (alone) {
    math_barrier();
  } else {
    if (over_tiles) cluster_arrive();
    if (threadIdx.x == 0) received.expect(uint32_t(place.active_ranks - (place.keys > 0 ? 1 : 0)) * bytes_from_rank(args));
    __syncwarp();
    cluster_wait();
  }
  const SumSender sender = {bytes + received_at, shared_at + uint32_t(received_at), received.address, place.rank};
  if (place.keys > 0) send_sums(math, args, sender);
  math_barrier();
  if (!alone) received.wait(0);
  const Merge<Shared> merge{shared, args, place, exp2_scale, int(threadIdx.x)};
  merge.cluster(bytes + received_at);
  if (place.active_groups > 1 && merge.last_to_arrive()) merge.groups();
}

}  // namespace dsacore::cuda
