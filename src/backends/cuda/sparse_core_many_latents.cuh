// Sparse core for many heads: a warpgroup that sums 256 of the latents over all tiles.
#pragma once

#include <cuda_bf16.h>

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

  /// Rounds the latents of a row in one part; after `kMath`. `to`: of the CTA's first head.
  __device__ __forceinline__ void write(BFloat16* to, int heads, float scale) const {
    to += kLatent / kLatentGroups * group;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = T::head_of(h), at = h / 2 * 4 + h % 2;
      if (head >= heads) continue;
      const float2 factors = shared.factors[head];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        float2 pair = {sums[block][at] * factors.x, sums[block][at + 2] * factors.x};
        if constexpr (F::kScaledKeys) pair = {pair.x * factors.y, pair.y * factors.y};
        *reinterpret_cast<__nv_bfloat162*>(to + head * kLatent + F::latent_of(block, lane, 0)) =
            __floats2bfloat162_rn(pair.x * scale, pair.y * scale);
      }
    }
  }

  /// Leaves those of a part; after `kMath`. `cta` is its place among all parts.
  __device__ __forceinline__ void leave(const ManyHeadsParts& parts, int cta) const {
    const int first = (cta * Columns + 2 * lane.column()) * kPartUnits + kPartUnits / kLatentGroups * group + lane.warp;
    uint4* to = parts.latents + (int64_t(first) * 8 + lane.row());
    float* units = parts.units + first;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int at = h / 2 * 4 + h % 2, next = h / 2 * 8 + h % 2;  // heads past the lane's first
      float largest = 0;
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        largest = fmaxf(largest, fmaxf(fabsf(sums[block][at]), fabsf(sums[block][at + 2])));
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
      const HalfUnit half(__float_as_uint(largest));
      uint32_t words[4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        words[block] = to_f16(sums[block][at] * half.factor, sums[block][at + 2] * half.factor);
      }
      to[next * kPartUnits * 8] = {words[0], words[1], words[2], words[3]};
      if (lane.row() != 0) continue;
      const float2 factors = shared.factors[T::head_of(h)];
      units[next * kPartUnits] = half.unit * factors.x * factors.y;
    }
  }
};

}  // namespace dsacore::cuda::many
