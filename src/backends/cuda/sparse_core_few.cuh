// Sparse core for few heads, step 11 of spec.md: attention of all heads over the selected cache rows, 16 or 32 heads a
// CTA.
//
// Two numbers, per row of 2048 keys and 12 heads: 1.34 MB of cache rows (656 bytes each), 53 MFLOP. Every byte is read
// once, as it lies in the cache: one bulk copy a row into a ring of tiles. More than 32 heads are groups of CTAs, of
// which all but one find the rows in L2.
//
//   producers  4 warps   query, ids -> rows of a tile in shared memory
//   math       8 warps   logits | softmax | latents of a tile, a barrier between; sums -> memory
//
// Rows of nvfp4_ds_mla are widened to FP16, block scales and all, by the warps that multiply them for the logits, which
// leave them in a tile of their own to the latents.
//
// The parts of a row are merged by the value kernel that reads them, or by a kernel of its own
// (sparse_core_few_merge.cuh).
//
// What bounds it: at 64 rows of 656 bytes and 12 heads the gather, 2740 of 2860 clocks a tile of 64 keys (logits 1000,
// softmax 550, latents 740), and of nvfp4_ds_mla the math (1300, 320, 770, barriers 120); with 32 heads a CTA the math,
// 3700 clocks a tile; with few rows the latency of one dependent step after another.
#pragma once

#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/sparse_core_few_math.cuh"
#include "backends/cuda/sparse_core_no_key.cuh"
#include "backends/cuda/uniform.cuh"

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
  int stages;  ///< tiles in the ring
};

/// Keys of a CTA that begins at place `first` of a row that has `valid`.
__device__ __forceinline__ int keys_of(const FewHeadsArgs& args, int valid, int first) {
  return min(max(min(valid, int(args.topk_rows.extent(1))) - first, 0), args.plan.split_keys());
}

/// Places of shared memory, as addresses.
struct FewHeadsPlaces {
  uint32_t query, ring;
  uint32_t full, empty;
  Barrier query_arrived;

  __device__ __forceinline__ Barrier full_at(int stage) const { return {full + uint32_t(stage * 8)}; }
  __device__ __forceinline__ Barrier empty_at(int stage) const { return {empty + uint32_t(stage * 8)}; }
};

/// Goes round a ring of `stages` tiles.
struct TilePlace {
  int stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A producer warp's share of the query and of all tiles.
template <KvFormat Format, int Keys>
struct Producer {
  using F = FewHeadsFormat<Format>;
  static constexpr int kShare = Keys / kProducerWarps;  ///< rows of a tile

  const FewHeadsArgs& args;
  const FewHeadsPlaces& places;
  int row, first_key;
  int first_head, heads;
  int warp, lane;
  bool elected;
  int32_t id;  ///< of lane i: of row i of this warp's share of the tile that is asked for next
  int keys;    ///< of this CTA

  /// Asks for the query and begins with the ids.
  __device__ __forceinline__ void begin() {
    // Asked for before it is known how many keys there are, and the query copied meanwhile: past the keys lie -1.
    id = id_at(0);
    const int valid = args.valid(row);
    fetch_query();
    keys = keys_of(args, valid, first_key);
  }

  /// Fetches this warp's share of every tile into the ring.
  __device__ __forceinline__ void fill_ring() {
    TilePlace to{args.stages};
#pragma unroll 1
    for (int first = 0; first < keys; first += Keys, to.next()) {
      if (first >= args.stages * Keys) places.empty_at(to.stage).wait(to.parity ^ 1);
      ask(first, places.ring + uint32_t(to.stage * kTileBytes<Format, Keys>), places.full_at(to.stage));
    }
  }

 private:
  __device__ __forceinline__ int32_t id_at(int first) const {
    const int place = first + warp * kShare + lane;
    const int readable = min(int(args.topk_rows.extent(1)) - first_key, args.plan.split_keys());
    return lane < kShare && place < readable ? args.topk_rows.row(row)[first_key + place] : 0;
  }

  __device__ __forceinline__ void fetch_query() const {
    if (elected) {
      places.query_arrived.expect(uint32_t((heads - warp + kProducerWarps - 1) / kProducerWarps * F::kQueryBytes));
    }
#pragma unroll 4
    for (int head = warp; head < heads; head += kProducerWarps) {
      if (elected) {
        bulk_copy(places.query + uint32_t(head * F::kQueryPitch), args.query.at(row, first_head + head), F::kQueryBytes,
                  places.query_arrived);
      }
    }
  }

  /// Copies this warp's rows of the tile of keys `first` and on into those of a tile at `to`, and loads the next ids.
  __device__ __forceinline__ void ask(int first, uint32_t to, Barrier arrived) {
    const int32_t next_id = id_at(first + Keys);
    const bool is_key = first + warp * kShare + lane < keys;
    const auto from = reinterpret_cast<uint64_t>(is_key ? args.cache + int64_t(id) * F::kRowBytes : kNoKey[lane]);
    to += uint32_t(warp * kShare * F::kPitch);
    if (elected) arrived.expect(kShare * F::kRowBytes);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const uint64_t source = __shfl_sync(kWholeWarp, from, i);
      if (elected) {
        bulk_copy_once(to + uint32_t(i * F::kPitch), reinterpret_cast<const void*>(source), F::kRowBytes, arrived);
      }
    }
    id = next_id;
  }
};

/// All tiles of this CTA by one math warp.
template <KvFormat Format, int Keys, int Sixteens>
__device__ __forceinline__ void attend_tiles(MathWarp<Format, Keys, Sixteens>& math, int keys, int stages,
                                             std::byte* ring, const FewHeadsPlaces& places) {
  constexpr bool kWidened = FewHeadsFormat<Format>::kWidened;
  const int values_at = stages * kTileBytes<Format, Keys>;
  TilePlace at{stages}, values{kValueTiles};
#pragma unroll 1
  for (int first = 0; first < keys; first += Keys, at.next(), values.next()) {
    const int tile_at = at.stage * kTileBytes<Format, Keys>;
    const int widened_at = values_at + values.stage * kValueTileBytes<Format, Keys>;
    const auto leave_tile = [&] {
      __syncwarp();
      if (math.lane == 0) places.empty_at(at.stage).arrive();
    };
    places.full_at(at.stage).wait(at.parity);
    if constexpr (kWidened) {
      math.logits_and_widen(ring + tile_at, ring + widened_at);
      leave_tile();
    } else {
      math.logits(ring + tile_at, places.ring + uint32_t(tile_at));
    }
    math_barrier();
    math.softmax(keys - first);
    math_barrier();
    math.latents(places.ring + uint32_t(kWidened ? widened_at : tile_at));
    if constexpr (!kWidened) leave_tile();
  }
}

/// One CTA; its math warps take `Registers` a thread.
template <KvFormat Format, int Keys, int Sixteens, int Registers>
__device__ __forceinline__ void few_heads(const FewHeadsArgs& args) {
  using F = FewHeadsFormat<Format>;
  using Shared = FewHeadsShared<Format, Keys, Sixteens>;
  extern __shared__ __align__(128) std::byte bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  std::byte* ring = bytes + sizeof(Shared);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const uint32_t shared_at = fixed_shared_address(&shared);
  const FewHeadsPlaces places = {.query = shared_at + uint32_t(offsetof(Shared, query)),
                                 .ring = shared_at + uint32_t(sizeof(Shared)),
                                 .full = shared_at + uint32_t(offsetof(Shared, full)),
                                 .empty = shared_at + uint32_t(offsetof(Shared, empty)),
                                 .query_arrived = {shared_at + uint32_t(offsetof(Shared, query_arrived))}};
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      places.full_at(i).init(kProducerWarps);
      places.empty_at(i).init(kMathWarps);
    }
    places.query_arrived.init(kProducerWarps);
    publish_barriers();
  }
  __syncthreads();
  // Groups of heads first: those of the same keys run together, and all but one find the rows in L2.
  const int first_head = int(blockIdx.x) * args.plan.group_heads, split = int(blockIdx.y), row = int(blockIdx.z);
  const int heads = min(args.query.heads - first_head, args.plan.group_heads);
  const int first_key = split * args.plan.split_keys();
  if (warp >= kMathWarps) {
    give_registers<F::kWidened ? 40 : 24>();
    Producer<Format, Keys> producer = {args, places,      row, first_key, first_head, heads, warp - kMathWarps,
                                       lane, elect_one(), 0,   0};
    wait_for_earlier_kernels();
    let_next_kernel_start();
    producer.begin();
    producer.fill_ring();
    return;
  }
  take_registers<Registers - (F::kWidened ? 8 : 0)>();
  MathWarp<Format, Keys, Sixteens> math(shared, shared_at, F::kWidened ? uniform_warp() : warp, lane,
                                        args.scale * kLog2E);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int keys = keys_of(args, args.valid(row), first_key);
  places.query_arrived.wait(0);  // also where there is no key: a CTA stays until what it asked for has come
  if (keys == 0) return;
  math.load_query(heads);
  math_barrier();  // logits lie over the query
  attend_tiles(math, keys, args.stages, ring, places);
  math.leave(args.parts, row, split, args.plan.splits, args.query.heads, first_head, heads);
}

/// 16 heads a CTA; one of the value stage still fits beside it.
template <KvFormat Format, int Keys>
__global__ void __maxnreg__(112) few_heads_single(const __grid_constant__ FewHeadsArgs args) {
  few_heads<Format, Keys, 1, 152>(args);
}
/// 32 heads a CTA: each key is widened once for two products.
template <KvFormat Format, int Keys>
__global__ void __maxnreg__(168) few_heads_double(const __grid_constant__ FewHeadsArgs args) {
  few_heads<Format, Keys, 2, 240>(args);
}

}  // namespace dsacore::cuda
