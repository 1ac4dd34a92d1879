// Sparse core for few heads (1 to 16), step 11 of spec.md: attention of all heads over the selected cache rows.
//
// Two numbers, per row of 2048 keys and 12 heads: 1.34 MB of cache rows (656 bytes each), 53 MFLOP. Bound by memory by
// more than 5 to 1, so every byte is read once, as it lies in the cache: one bulk copy a row into a ring of tiles.
//
//   producers  4 warps   ids -> rows of a tile in shared memory
//   math       8 warps   logits | softmax | latents of a tile, a barrier between
//   merge                cluster by way of shared memory, clusters by way of memory (sparse_core_few_merge.cuh)
//
// From 17 rows on memory bounds the tiles; with fewer, and in the merge, the latency of one dependent step after
// another.
//
// FP64 is in one place: a head's lse from its largest logit, so that logits of 10^4 cost it nothing.
#pragma once

#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sparse_core_few_merge.cuh"
#include "backends/cuda/sparse_core_no_key.cuh"

namespace dsacore::cuda {

/// A producer warp. It asks for its first rows' ids before it knows how many keys there are: past them lie -1.
template <KvFormat Format, int Keys>
struct Producer {
  using F = FewHeadsFormat<Format>;
  static constexpr int kShare = Keys / kProducerWarps;  ///< rows of a tile
  static constexpr int kTileBytes = FewHeadsShared<Format, Keys>::kTileBytes;

  const FewHeadsArgs& args;
  int warp, lane;
  const int32_t* ids;  ///< of this CTA's keys
  int readable;        ///< of them
  int32_t id;          ///< of lane i: of the next tile's row i of this warp's share

  __device__ __forceinline__ Producer(const FewHeadsArgs& a, const FewHeadsPlace& place, int warp_index, int lane_index)
      : args(a), warp(warp_index), lane(lane_index) {
    const int first = (place.group * a.plan.cluster + place.rank) * a.plan.split_keys();
    ids = a.topk_rows.row(place.row) + first;
    readable = min(int(a.topk_rows.extent(1)) - first, a.plan.split_keys());
    id = id_of(warp * kShare);
  }

  /// Fetches this warp's share of every tile.
  __device__ __forceinline__ void run(int keys, uint32_t ring, uint32_t full, uint32_t empty) {
    const bool elected = elect_one();
    int stage = 0;
    uint32_t parity = 1;
    for (int first = warp * kShare; first - warp * kShare < keys; first += Keys) {
      const int32_t next_id = id_of(first + Keys);
      const auto from =
          reinterpret_cast<uint64_t>(first + lane < keys ? args.cache + int64_t(id) * F::kRowBytes : kNoKey[lane]);
      const uint32_t to = ring + uint32_t(stage * kTileBytes + warp * kShare * F::kPitch);
      const Barrier arrived = {full + uint32_t(stage * 8)};
      if (first >= args.stages * Keys) Barrier{empty + uint32_t(stage * 8)}.wait(parity);
      if (elected) arrived.expect(kShare * F::kRowBytes);
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        const uint64_t row = __shfl_sync(kWholeWarp, from, i);
        if (elected) {
          bulk_copy(to + uint32_t(i * F::kPitch), reinterpret_cast<const void*>(row), F::kRowBytes, arrived);
        }
      }
      id = next_id;
      if (++stage == args.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

 private:
  __device__ __forceinline__ int32_t id_of(int first) const {
    return lane < kShare && first + lane < readable ? ids[first + lane] : 0;
  }
};

/// All tiles of this CTA by one math warp.
template <KvFormat Format, int Keys>
__device__ __forceinline__ void attend_tiles(MathWarp<Format, Keys>& warp, const FewHeadsArgs& args,
                                             const FewHeadsPlace& place, const std::byte* ring, uint32_t full,
                                             uint32_t empty) {
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

__device__ __forceinline__ FewHeadsPlace few_heads_place(const FewHeadsArgs& args) {
  const int block = int(blockIdx.x), cluster = block >> args.cluster_bits;
  return {.row = cluster >> args.group_bits,
          .group = cluster & (args.plan.groups - 1),
          .rank = block & (args.plan.cluster - 1),
          .keys = 0,
          .active_ranks = 0,
          .active_groups = 0};
}

/// Reads the row's count of keys.
__device__ __forceinline__ void count_keys(const FewHeadsArgs& args, FewHeadsPlace& place) {
  const int valid = min(max(args.valid(place.row), 0), int(args.topk_rows.extent(1)));
  const int keys = args.plan.split_keys(), cluster_keys = keys << args.cluster_bits;
  const int in_cluster = min(max(valid - place.group * cluster_keys, 0), cluster_keys);
  // Quotients of small integers, at least 1 / 2048 from the next: the addend rounds them to the right side.
  const auto quotient = [](int a, int b) { return int(__fdividef(float(a), float(b)) + 0x1p-13f); };
  place.keys = min(max(in_cluster - place.rank * keys, 0), keys);
  place.active_ranks = quotient(in_cluster + keys - 1, keys);
  place.active_groups = quotient(valid + cluster_keys - 1, cluster_keys);
}

template <KvFormat Format, int Keys>
__global__ void __launch_bounds__(kFewHeadsThreads, 2) few_heads_kernel(const __grid_constant__ FewHeadsArgs args) {
  using Shared = FewHeadsShared<Format, Keys>;
  extern __shared__ __align__(128) std::byte bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const std::byte* ring = bytes + kRingAt<Format, Keys>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const uint32_t shared_at = fixed_shared_address(&shared);
  const uint32_t full = shared_at + uint32_t(offsetof(Shared, full)),
                 empty = shared_at + uint32_t(offsetof(Shared, empty));
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
  // The cluster's barrier says that all its CTAs can be sent to: that they have started, and have read their tiles
  // where what is sent lies over them.
  const bool over_tiles = args.received_at == 0, alone = args.plan.cluster == 1;
  const bool arrive_first = !alone && !over_tiles, arrive_later = !alone && over_tiles;
  if (arrive_first) cluster_arrive();
  wait_for_earlier_kernels();
  let_next_kernel_start();

  FewHeadsPlace place = few_heads_place(args);
  if (warp >= kMathWarps) {
    give_registers<24>();
    Producer<Format, Keys> producer(args, place, warp - kMathWarps, lane);
    count_keys(args, place);
    producer.run(place.keys, shared_at + uint32_t(kRingAt<Format, Keys>), full, empty);
    if (arrive_later) cluster_arrive();
    if (!alone) cluster_wait();
    return;
  }
  take_registers<104>();
  const float exp2_scale = args.scale * 1.44269504088896340736f;
  MathWarp<Format, Keys> math(shared, shared_at, warp, lane, exp2_scale);
  math.query.load(args.query, place.row, math.group(), lane);
  count_keys(args, place);
  if (place.active_groups == 0 && place.group == 0) write_empty_row(args, place, int(threadIdx.x));
  if (place.keys > 0) {
    math.query.convert(args.query.heads, lane);
    attend_tiles(math, args, place, ring, full, empty);
  }
  if (arrive_later) cluster_arrive();
  if (threadIdx.x == 0)
    received.expect(uint32_t(place.active_ranks - (place.keys > 0 ? 1 : 0)) * bytes_from_rank(args));
  __syncwarp();
  const int received_at = over_tiles ? kExpandedAt<Format, Keys> : args.received_at;
  Merge<Shared> merge(shared, args, place, exp2_scale, int(threadIdx.x));
  if (alone) {
    math_barrier();
  } else {
    cluster_wait();
  }
  if (place.keys > 0)
    send_sums(math, args, place.rank, {bytes + received_at, shared_at + uint32_t(received_at), received.address});
  math_barrier();
  if (place.active_ranks == 0) return;  // the whole cluster
  received.wait(0);
  merge.cluster(bytes + received_at);
  if (place.active_groups > 1 && merge.last_to_arrive()) merge.groups();
}

}  // namespace dsacore::cuda
