// Sparse core for many heads: a warpgroup that sums 256 of the latents over all tiles.
#pragma once

#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"

namespace dsacore::cuda::many {

template <class Layout, int Columns>
struct Latents : Tiles<Layout, Columns> {
  using T = Tiles<Layout, Columns>;
  using T::base;
  using T::kAccumulators;
  using T::kHeads;
  using T::lane;
  using T::shared;
  using T::work;
  using typename T::F;
  using typename T::F16;
  using typename T::S;

  const int group;

  float sums[4][kAccumulators] = {};  ///< O^T of M blocks of the group's latents

  __device__ __forceinline__ Latents(S& shared, const Work& work, int group, Lane lane)
      : T(shared, work, lane), group(group) {}

  __device__ __forceinline__ void run() {
    for (int tile = 0; tile < work.tiles; ++tile) accumulate(tile);
  }

  /// Adds a tile's weighted values.
  __device__ __forceinline__ void accumulate(int tile) {
    const int source = tile % kScoreGroups;
    Barrier{base + uint32_t(offsetof(S, written)) + 8 * source}.wait(uint32_t(tile / kScoreGroups) & 1);
    if (shared.raised[source] != 0) {
      float factors[kHeads];
      T::load_heads(shared.rescale[source], factors);
#pragma unroll
      for (auto& block : sums) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) block[i] *= factors[i / 4 * 2 + i % 2];
      }
    }
    uint32_t rows[kTileSlots], scales[kTileSlots];
#pragma unroll
    for (int i = 0; i < kTileSlots; ++i) {
      const uint32_t slot = T::slot_of(kTileSlots * tile + i);
      rows[i] = T::rows_of(slot), scales[i] = T::table_of(slot);
    }
    typename F::Values values(rows, scales, group, lane);
    const uint64_t weights = swizzled_tile(base + uint32_t(offsetof(S, weights)) + source * S::kBlockBytes);
    uint32_t a[kOpenValues][4];
    const auto multiply = [&](int product, const uint32_t(&fragment)[4]) {
      const int pair = product / 2;
      F16::registers(sums[F::value_block(pair)], fragment, weights + 2 * (pair / 4 * 2 + product % 2), 1);
    };
    multiply_made<0, kValuePairs, 0, kValuePairs>(values, a, multiply);
    release(kTileSlots * tile);
    multiply_made<kValuePairs, 2 * kValuePairs, 0, kValuePairs>(values, a, multiply);
    release(kTileSlots * tile + 2);
    wgmma_wait<0>();
    for (auto& block : sums) wgmma_settle(block);
    if (lane.lane == 0) Barrier{base + uint32_t(offsetof(S, read)) + 8 * source}.arrive();
  }

  /// The fragments of half of a tile's slots are made.
  __device__ __forceinline__ void release(int first) {
    __syncwarp();  // by all lanes
    if (lane.lane != 0) return;
    for (int nth = first; nth < first + kTileSlots / 2; ++nth) {
      Barrier{base + uint32_t(offsetof(S, empty)) + 8 * T::slot_of(nth)}.arrive();
    }
  }

  /// Hands `write(head, latent, values of it and the next)` the normalised latents of this thread; after `kMath`.
  template <class Write>
  __device__ __forceinline__ void finish(Write write) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = T::head_of(h);
      const float2 factors = shared.factors[head];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const int at = h / 2 * 4 + h % 2;
        float2 pair = {sums[block][at] * factors.x, sums[block][at + 2] * factors.x};
        if constexpr (F::kScaledKeys) pair = {pair.x * factors.y, pair.y * factors.y};
        write(head, kLatent / kLatentGroups * group + F::latent_of(block, lane, 0), pair);
      }
    }
  }
};

}  // namespace dsacore::cuda::many
