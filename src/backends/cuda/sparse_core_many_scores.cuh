// Sparse core for many heads: a warpgroup that makes every other tile's logits, and of them the weights of its values.
#pragma once

#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"

namespace dsacore::cuda::many {

template <class Layout, int Columns>
struct Scores : Tiles<Layout, Columns> {
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

  const ManyHeadsArgs& args;
  const int group;

  float logits[kAccumulators];  ///< base 2, of the current tile
  float sums[kHeads] = {};      ///< of p, over this thread's keys
  float exponents[2] = {};      ///< of the keys of the current tile, rows r and r + 8

  __device__ __forceinline__ Scores(S& shared, const ManyHeadsArgs& args, const Work& work, int group, Lane lane)
      : T(shared, work, lane), args(args), group(group) {}

  __device__ __forceinline__ void run() {
    for (int tile = group; tile < work.tiles; tile += kScoreGroups) {
      score(tile);
      follow(tile);
      weigh();
    }
    finish();
  }

  /// Logits of a tile.
  __device__ __forceinline__ void score(int tile) {
    const int nth = 2 * tile + lane.warp / 2;
    const uint32_t slot = T::slot_of(nth);
    const Barrier ready{base + uint32_t(F::kTableBytes > 0 ? offsetof(S, ready) : offsetof(S, full)) + 8 * slot};
    ready.wait(uint32_t(nth / S::kSlots) & 1);
    const uint32_t table = T::table_of(slot);
    typename F::Keys keys(T::rows_of(slot), table, lane);
    const uint64_t query_tile = swizzled_tile(base + uint32_t(offsetof(S, query)));
    uint32_t a[2][4];  // one is made while the other is multiplied
    keys.fetch(0);
#pragma unroll
    for (int product = 0; product < 2 * kKeyPairs; ++product) {
      const int pair = product / 2;
      if (product > 1) wgmma_wait<1>();  // the one that read what is made now
      keys.make(pair, product % 2, a[product % 2]);
      if (product % 2 == 1 && pair + 1 < kKeyPairs) keys.fetch(pair + 1);
      if constexpr (F::kPlainPe) {
        if (product == 2 * kLatentPairs) scale_keys(table);
      }
      const uint64_t dims = query_tile + uint64_t(product / 4 * S::kBlockBytes / 16 + product % 4 * 2);
      wgmma_fence();
      if (pair >= kLatentPairs && F::kPlainPe) {
        WgmmaShape<Operands::kBf16, Columns>::registers(logits, a[product % 2], dims, 1);
      } else {
        F16::registers(logits, a[product % 2], dims, product > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_settle(logits);

#pragma unroll
    for (float& x : logits) x = fmaf(x, args.scale_high, x * args.scale_low);
    const int left = int(work.valid - work.first) - tile * kManyHeadsTile;
    if (left >= kManyHeadsTile) return;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      if (16 * lane.warp + i / 2 % 2 * 8 + lane.row() >= left) logits[i] = -INFINITY;
    }
  }

  /// The products of latents in units of the logits: pe, which has no scale, is added to them.
  __device__ __forceinline__ void scale_keys(uint32_t table) {
    float units[kHeads];
    T::load_heads(shared.query_unit, units);
    wgmma_wait<0>();
    wgmma_settle(logits);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 16 * lane.warp + 8 * i + lane.row();
      exponents[i] = float_of(load_word(table + F::kExponentsAt + 4 * (key % kSlotKeys)));
      const float key_unit = float_of(uint32_t(int(exponents[i]) + 127) << 23);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float& x = logits[h / 2 * 4 + 2 * i + h % 2];
        x = x * units[h] * key_unit;
      }
    }
  }

  /// Waits for the references after the tile before, and for the place of the weights; brings this thread's sums to
  /// those references.
  __device__ __forceinline__ void follow(int tile) {
    const int other = group ^ 1;
    if (tile >= kScoreGroups) {
      Barrier{base + uint32_t(offsetof(S, read)) + 8 * group}.wait(uint32_t(tile / kScoreGroups - 1) & 1);
    }
    if (tile == 0) return;
    Barrier{base + uint32_t(offsetof(S, written)) + 8 * other}.wait(uint32_t((tile - 1) / kScoreGroups) & 1);
    if (shared.raised[other] != 0) lower_sums(other);
  }

  /// Weights of a tile from its logits, into the group's place in shared memory.
  __device__ __forceinline__ void weigh() {
    const bool raised = barrier_any(kGroup + group, 128, outgrown());
    if (raised) raise();
    wgmma_settle(logits);  // what was computed for the vote alone is not kept
    float largest[kHeads], offset[kHeads];
    T::load_heads(shared.largest, largest);
    if constexpr (F::kScaledKeys) T::load_heads(shared.offset, offset);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = logits[h / 2 * 4 + 2 * i + h % 2];
        x -= largest[h];
        const float p = exp2_approx(x);
        sums[h] += p;
        x = F::kScaledKeys ? exp2_approx(x + (exponents[i] - offset[h])) : p;
      }
    }
    store_weights();
    if (lane.warp == 0 && lane.lane == 0) shared.raised[group] = raised;
    fence_async_proxy();
    __syncwarp();
    if (lane.lane == 0) Barrier{base + uint32_t(offsetof(S, written)) + 8 * group}.arrive();
  }

  /// Whether a logit of this thread is too far above a reference.
  __device__ __forceinline__ bool outgrown() const {
    float largest[kHeads], offset[kHeads];
    T::load_heads(shared.largest, largest);
    if constexpr (F::kScaledKeys) T::load_heads(shared.offset, offset);
    bool over = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = logits[h / 2 * 4 + 2 * i + h % 2] - largest[h];
        over |= x > kLargestP;
        if constexpr (F::kScaledKeys) over |= x + exponents[i] > offset[h] + kLargestWeight;
      }
    }
    return over;
  }

  /// Raises the references of those heads whose logits have outgrown them. No head's bits depend on another head.
  __device__ __forceinline__ void raise() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float x = logits[h / 2 * 4 + h % 2], y = logits[h / 2 * 4 + 2 + h % 2];
      float peak = fmaxf(x, y), weighted = F::kScaledKeys ? fmaxf(x + exponents[0], y + exponents[1]) : 0;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, mask));
        if constexpr (F::kScaledKeys) weighted = fmaxf(weighted, __shfl_xor_sync(0xFFFFFFFFu, weighted, mask));
      }
      if (lane.row() == 0) {
        shared.peaks[lane.warp][0][T::head_of(h)] = peak;
        if constexpr (F::kScaledKeys) shared.peaks[lane.warp][1][T::head_of(h)] = weighted;
      }
    }
    barrier_meet(kGroup + group, 128);
    if (const int head = 32 * lane.warp + lane.lane; head < Columns) raise_head(head);
    barrier_meet(kGroup + group, 128);
    lower_sums(group);
  }
  __device__ __forceinline__ float peak_of(int head, int kind) const {
    const auto& peaks = shared.peaks;
    return fmaxf(fmaxf(peaks[0][kind][head], peaks[1][kind][head]), fmaxf(peaks[2][kind][head], peaks[3][kind][head]));
  }
  __device__ __forceinline__ void raise_head(int head) {
    const float before = shared.largest[head], peak = peak_of(head, 0);
    const float largest = peak - before > kLargestP ? ceilf(peak) : before;
    const float lower = step_down(before, largest);
    float rescale = lower;
    if constexpr (F::kScaledKeys) {
      float offset = shared.offset[head];
      if (before != largest) offset -= largest - before;
      const float unraised = offset, weighted = peak_of(head, 1) - largest;
      // However coarse the peak of large logits is: the weights use the offset alone.
      if (weighted > offset + kLargestWeight) offset = ceilf(weighted) - kWeightRoom;
      rescale = step_down(unraised, offset);
      shared.offset[head] = offset;
    }
    shared.largest[head] = largest;
    shared.lower_sums[group][head] = lower;
    shared.rescale[group][head] = rescale;
  }

  /// Brings this thread's sums to the references that `source` has raised.
  __device__ __forceinline__ void lower_sums(int source) {
    float lower[kHeads];
    T::load_heads(shared.lower_sums[source], lower);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] *= lower[h];
  }

  /// P^T as a K-major B operand: [head][key], 128 bytes a head, swizzled.
  __device__ __forceinline__ void store_weights() {
    const int row = lane.lane % 8,
              tile = lane.lane / 8;  // 8 x 8 tiles: keys 0-7, 8-15 of the warp, then of the next 8 heads
    const uint32_t to = base + uint32_t(offsetof(S, weights)) + group * S::kBlockBytes +
                        uint32_t((tile / 2 * 8 + row) * 128) +
                        (uint32_t((2 * lane.warp + tile % 2) * 16) ^ uint32_t(row * 16));
    uint32_t pairs[kAccumulators / 2];
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) pairs[i] = to_f16(logits[2 * i], logits[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < Columns / 16; ++j) {
      store_matrices_transposed(to + j * 2048, {pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]});
    }
    if constexpr (Columns % 16 != 0) {
      constexpr int kLast = Columns / 16;
      store_matrices_transposed(to + kLast * 2048, {pairs[4 * kLast], pairs[4 * kLast + 1]});
    }
  }

  /// The softmax's denominators.
  __device__ __forceinline__ void finish() {
    if ((work.tiles - 1) % kScoreGroups != group) follow(work.tiles);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], mask);
      if (lane.row() == 0) shared.sums[4 * group + lane.warp][T::head_of(h)] = sums[h];
    }
    barrier_meet(kScores, kScoreThreads);
    const int head = 128 * group + 32 * lane.warp + lane.lane;
    if (head < Columns) {
      float sum = shared.sums[0][head];
      for (int warp = 1; warp < 4 * kScoreGroups; ++warp) sum += shared.sums[warp][head];
      shared.part[head] = {shared.largest[head], sum};
    }
    barrier_arrive(kMath, kMathThreads);
  }
};

}  // namespace dsacore::cuda::many
