// Sparse core for few heads (1 to 16), step 11 of spec.md: attention of all heads over the selected cache rows.
//
// Two numbers, per row of 2048 keys and 12 heads: 1.34 MB of cache rows (656 bytes each), 53 MFLOP. Every byte is read
// once, as it lies in the cache: one bulk copy a row into a ring of tiles.
//
//   producers  4 warps   query, ids -> rows of a tile in shared memory
//   math       8 warps   logits | softmax | latents of a tile, a barrier between; sums -> memory
//
// The parts of a row are merged by the value kernel that reads them, or by a kernel of its own
// (sparse_core_few_merge.cuh).
//
// What bounds it: the math, 3000 to 3800 clocks a tile of 64 keys, at 64 rows as well; with few rows the latency of one
// dependent step after another.
#pragma once

#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/sparse_core_few_math.cuh"
#include "backends/cuda/sparse_core_no_key.cuh"

namespace dsacore::cuda {

/// The kernel's parameter.
struct FewHeadsArgs {
  QueryRows query;
  View<const int32_t, 2> topk_rows;
  View<const int32_t, 1> valid;
  const std::byte* cache;
  Parts parts;
  float scale;  ///< of logits
  FewHeadsPlan plan;
  int split_bits;  ///< log2 of the plan's
  int stages;      ///< tiles in the ring
};

/// Keys of a CTA that begins at place `first` of a row that has `valid`.
__device__ __forceinline__ int keys_of(const FewHeadsArgs& args, int valid, int first) {
  return min(max(min(valid, int(args.topk_rows.extent(1))) - first, 0), args.plan.split_keys());
}

/// A producer warp's share of the query and of all tiles.
template <KvFormat Format, int Keys>
struct Producer {
  using F = FewHeadsFormat<Format>;
  static constexpr int kShare = Keys / kProducerWarps;  ///< rows of a tile
  static constexpr int kTileBytes = FewHeadsShared<Format, Keys>::kTileBytes;

  const FewHeadsArgs& args;
  int row, first_key;
  int warp, lane;
  bool elected;

  __device__ __forceinline__ void fetch_query(uint32_t to, Barrier arrived) const {
    const int heads = args.query.heads;
    if (elected) arrived.expect(uint32_t((heads - warp + kProducerWarps - 1) / kProducerWarps * F::kQueryBytes));
#pragma unroll
    for (int i = 0; i < kFewHeadsMax / kProducerWarps; ++i) {
      const int head = warp + i * kProducerWarps;
      if (elected && head < heads) {
        bulk_copy(to + uint32_t(head * F::kQueryPitch), args.query.at(row, head), F::kQueryBytes, arrived);
      }
    }
  }

  /// Fetches this warp's share of the query and of every tile.
  __device__ __forceinline__ void run(uint32_t query, Barrier query_arrived, uint32_t ring, uint32_t full,
                                      uint32_t empty) const {
    const int32_t* ids = args.topk_rows.row(row) + first_key;
    // Asked for before it is known how many keys there are, and the query copied meanwhile: past the keys lie -1.
    const int readable = min(int(args.topk_rows.extent(1)) - first_key, args.plan.split_keys());
    const auto id_of = [&](int first) { return lane < kShare && first + lane < readable ? ids[first + lane] : 0; };
    int32_t id = id_of(warp * kShare);  // of lane i: of the next tile's row i of this warp's share
    const int valid = args.valid(row);
    fetch_query(query, query_arrived);
    const int keys = keys_of(args, valid, first_key);
    int stage = 0;
    uint32_t parity = 1;
#pragma unroll 1
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
        const uint64_t source = __shfl_sync(kWholeWarp, from, i);
        if (elected) {
          bulk_copy(to + uint32_t(i * F::kPitch), reinterpret_cast<const void*>(source), F::kRowBytes, arrived);
        }
      }
      id = next_id;
      if (++stage == args.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

/// All tiles of this CTA by one math warp.
template <KvFormat Format, int Keys, int AtOnce>
__device__ __forceinline__ void attend_tiles(MathWarp<Format, Keys, AtOnce>& math, int keys, int stages,
                                             const std::byte* ring, uint32_t full, uint32_t empty) {
  constexpr int kTileBytes = FewHeadsShared<Format, Keys>::kTileBytes;
  const uint32_t ring_at = fixed_shared_address(ring);
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int first = 0; first < keys; first += Keys) {
    const std::byte* tile = ring + stage * kTileBytes;
    uint32_t operands = ring_at + uint32_t(stage * kTileBytes);
    const auto release = [&] {
      __syncwarp();
      if (math.lane == 0) Barrier{empty + uint32_t(stage * 8)}.arrive();
    };
    Barrier{full + uint32_t(stage * 8)}.wait(parity);
    if constexpr (FewHeadsFormat<Format>::kExpanded) {
      operands = math.shared_at + uint32_t(kExpandedAt<Format, Keys>);
      if (first > 0) math_barrier();  // the tile before has been read
      expand_tile<Keys>(tile, math.expanded, math.warp * 32 + math.lane);
      release();
      math_barrier();
    }
    math.logits(tile, operands);
    math_barrier();
    math.softmax(keys - first);
    math_barrier();
    math.latents(operands);
    if constexpr (!FewHeadsFormat<Format>::kExpanded) release();
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

/// One CTA; its math warps take `Registers` a thread.
template <KvFormat Format, int Keys, int AtOnce, int Registers>
__device__ __forceinline__ void few_heads(const FewHeadsArgs& args) {
  using Shared = FewHeadsShared<Format, Keys>;
  extern __shared__ __align__(128) std::byte bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const uint32_t shared_at = fixed_shared_address(&shared);
  const uint32_t full = shared_at + uint32_t(offsetof(Shared, full)),
                 empty = shared_at + uint32_t(offsetof(Shared, empty));
  const Barrier query_arrived = {shared_at + uint32_t(offsetof(Shared, query_arrived))};
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      Barrier{full + uint32_t(8 * i)}.init(kProducerWarps);
      Barrier{empty + uint32_t(8 * i)}.init(kMathWarps);
    }
    query_arrived.init(kProducerWarps);
    publish_barriers();
  }
  __syncthreads();
  const int row = int(blockIdx.x) >> args.split_bits, split = int(blockIdx.x) & (args.plan.splits - 1);
  const int first_key = split * args.plan.split_keys();
  if (warp >= kMathWarps) {
    give_registers<24>();
    const Producer<Format, Keys> producer = {args, row, first_key, warp - kMathWarps, lane, elect_one()};
    wait_for_earlier_kernels();
    let_next_kernel_start();
    producer.run(shared_at + uint32_t(offsetof(Shared, query)), query_arrived,
                 shared_at + uint32_t(kRingAt<Format, Keys>), full, empty);
    return;
  }
  take_registers<Registers>();
  MathWarp<Format, Keys, AtOnce> math(shared, shared_at, warp, lane, args.scale * kLog2E);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int keys = keys_of(args, args.valid(row), first_key);
  query_arrived.wait(0);  // also where there is no key: a CTA stays until what it asked for has come
  if (keys == 0) return;
  math.query.load(shared.query, args.query.heads, math.group(), lane);
  math.query.convert(args.query.heads, lane);
  math_barrier();  // logits lie over the query
  attend_tiles(math, keys, args.stages, bytes + kRingAt<Format, Keys>, full, empty);
  math.leave(args.parts, row, split, args.plan.splits, args.query.heads);
}

/// Two CTAs an SM, which hide each other's latency.
template <KvFormat Format, int Keys>
__global__ void __launch_bounds__(kFewHeadsThreads, 2) few_heads_pair(const __grid_constant__ FewHeadsArgs args) {
  few_heads<Format, Keys, 16, 104>(args);
}
/// One CTA an SM: more registers, and no two CTAs of a small grid ever share one. A CTA of the value stage still fits
/// beside it.
template <KvFormat Format, int Keys>
__global__ void __maxnreg__(112) few_heads_alone(const __grid_constant__ FewHeadsArgs args) {
  few_heads<Format, Keys, 32, 152>(args);
}

}  // namespace dsacore::cuda
