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
    const uint32_t slot[2] = {T::slot_of(2 * tile), T::slot_of(2 * tile + 1)};
    const uint32_t rows[2] = {T::rows_of(slot[0]), T::rows_of(slot[1])};
    const uint32_t scales[2] = {T::table_of(slot[0]), T::table_of(slot[1])};
    typename F::Values values(rows, scales, group, lane);
    const uint64_t weights = swizzled_tile(base + uint32_t(offsetof(S, weights)) + source * S::kBlockBytes);
    uint32_t a[kOpenValues][4];
    multiply_made<0, 2 * kValuePairs, 0, kValuePairs>(values, a, [&](int product, const uint32_t(&fragment)[4]) {
      F16::registers(sums[F::value_block(product / 2, product % 2)], fragment,
                     weights + 2 * F::value_step(product / 2, product % 2), 1);
    });
    __syncwarp();  // all lanes have their fragments
    if (lane.lane == 0) {
      for (const uint32_t s : slot) Barrier{base + uint32_t(offsetof(S, empty)) + 8 * s}.arrive();
    }
    wgmma_wait<0>();
    for (auto& block : sums) wgmma_settle(block);
    if (lane.lane == 0) Barrier{base + uint32_t(offsetof(S, read)) + 8 * source}.arrive();
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
