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

  float logits[kAccumulators];  ///< before the scale that makes them base 2, of the current tile
  float sums[kHeads] = {};      ///< of p, over this thread's keys
  float key_units[2] = {};      ///< 2^exponent of the keys of the current tile, rows r and r + 8

  __device__ __forceinline__ Scores(S& shared, const ManyHeadsArgs& args, const Work& work, int group, Lane lane)
      : T(shared, work, lane), args(args), group(group) {}

  __device__ __forceinline__ void run() {
    for (int tile = group; tile < work.tiles; tile += kScoreGroups) {
      score(tile);
      if constexpr (!F::kPlainPe) follow(tile);
      weigh();
    }
    finish();
  }

  /// Logits of a tile.
  __device__ __forceinline__ void score(int tile) {
    const int nth = kTileSlots * tile + lane.warp;
    const uint32_t slot = T::slot_of(nth);
    const Barrier ready{base + uint32_t(F::kTableBytes > 0 ? offsetof(S, ready) : offsetof(S, full)) + 8 * slot};
    ready.wait(uint32_t(nth / S::kSlots) & 1);
    const uint32_t table = T::table_of(slot);
    typename F::Keys keys(T::rows_of(slot), table, lane);
    uint32_t a[kOpenKeys][4];
    multiply<0, 2 * kLatentPairs>(keys, a);
    if constexpr (F::kPlainPe) scale_keys(table);
    multiply<2 * kLatentPairs, 2 * kKeyPairs>(keys, a);
    if constexpr (F::kPlainPe) follow(tile);  // while pe is multiplied; other formats lack the registers for that
    wgmma_wait<0>();
    wgmma_settle(logits);

    const int left = work.keys - tile * kManyHeadsTile;
    if (left >= kManyHeadsTile) return;
    const float no_key = fminf(fmaxf(kNoKeyLogit / args.scale_high, -FLT_MAX), FLT_MAX);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      if (16 * lane.warp + i / 2 % 2 * 8 + lane.row() >= left) logits[i] = no_key;
    }
  }

  /// Adds products of 16 dims to the logits.
  template <int First, int Last>
  __device__ __forceinline__ void multiply(typename F::Keys& keys, uint32_t (&a)[kOpenKeys][4]) {
    constexpr int kFirstOpen = F::kPlainPe ? First : 0;
    uint32_t query = base + uint32_t(offsetof(S, query));
    asm volatile("" : "+r"(query));  // or the addresses of products are kept from tile to tile, in registers
    const uint64_t query_tile = swizzled_tile(query);
    multiply_made<First, Last, kFirstOpen, kKeyPairs>(keys, a, [&](int product, const uint32_t(&fragment)[4]) {
      const uint64_t dims = query_tile + uint64_t(product / 4 * S::kBlockBytes / 16 + product % 4 * 2);
      if (product >= 2 * kLatentPairs && F::kPlainPe) {
        WgmmaShape<Operands::kBf16, Columns>::registers(logits, fragment, dims, 1);
      } else {
        F16::registers(logits, fragment, dims, product > 0);
      }
    });
  }

  /// The products of latents in units of the logits: pe, which has no scale, is added to them.
  __device__ __forceinline__ void scale_keys(uint32_t table) {
    float units[kHeads];
    T::load_heads(shared.query_unit, units);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 16 * lane.warp + 8 * i + lane.row();
      key_units[i] = float_of(load_word(table + F::kUnitsAt + 4 * (key % kSlotKeys)));
    }
    wgmma_wait<0>();
    wgmma_settle(logits);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) logits[i] = logits[i] * units[i / 4 * 2 + i % 2] * key_units[i / 2 % 2];
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

  /// Weights of a tile from its logits, into the group's place in shared memory. They are made before it is known that
  /// the references do for them, and once more where those had to be raised.
  __device__ __forceinline__ void weigh() {
    float added[kHeads];  // of p, of this tile
    bool raised = false;
    while (true) {
      const bool outgrown = store_weights(added);
      if (raised || !barrier_any(kGroup + group, 128, outgrown)) break;
      raise();
      raised = true;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] += added[h];
    if (lane.warp == 0 && lane.lane == 0) shared.raised[group] = raised;
    fence_async_proxy();
    __syncwarp();
    if (lane.lane == 0) Barrier{base + uint32_t(offsetof(S, written)) + 8 * group}.arrive();
  }

  /// P^T as a K-major B operand: [head][key], 128 bytes a head, swizzled. Returns whether a logit of this thread may be
  /// too far above a reference: any by which raise_head raises one, but beside a NaN of the same head.
  __device__ __forceinline__ bool store_weights(float (&added)[kHeads]) const {
    const int row = lane.lane % 8,
              tile = lane.lane / 8;  // 8 x 8 tiles: keys 0-7, 8-15 of the warp, then of the next 8 heads
    const uint32_t to = base + uint32_t(offsetof(S, weights)) + group * S::kBlockBytes +
                        uint32_t((tile / 2 * 8 + row) * 128) +
                        (uint32_t((2 * lane.warp + tile % 2) * 16) ^ uint32_t(row * 16));
    float largest_added = 0;
    uint32_t largest_weights = 0;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j) {
      make_weights(j, added, pairs + j % 2 * 2);
      largest_added = fmaxf(largest_added, fmaxf(added[2 * j], added[2 * j + 1]));
      for (int i = 0; i < 2; ++i) largest_weights = larger_f16(largest_weights, pairs[j % 2 * 2 + i]);
      if (j % 2 == 1) {
        store_matrices_transposed(to + j / 2 * 2048, pairs);
      } else if (j + 1 == Columns / 8) {
        store_matrices_transposed(to + j / 2 * 2048, {pairs[0], pairs[1]});
      }
    }
    return largest_added > kNearlyLargestP ||
           (F::kScaledKeys && max(largest_weights << 16, largest_weights) >= kNearlyLargestWeight);
  }

  /// What a thread has of the weights of 8 heads, and their sums of p.
  __device__ __forceinline__ void make_weights(int j, float (&added)[kHeads], uint32_t* pairs) const {
    const float2 largest = *reinterpret_cast<const float2*>(shared.largest + T::head_of(2 * j));
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = logits[4 * j + i], reference = i % 2 == 0 ? largest.x : largest.y;
      p[i] = exp2_approx(fmaf(x, args.scale_high, fmaf(x, args.scale_low, -reference)));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) added[2 * j + i] = p[i] + p[2 + i];
    if constexpr (F::kScaledKeys) {
      const float2 unit = *reinterpret_cast<const float2*>(shared.weight_unit + T::head_of(2 * j));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[i] = p[i] * (key_units[i / 2] * (1.0f / (1 << kUnitShift))) * (i % 2 == 0 ? unit.x : unit.y);
    }
    for (int i = 0; i < 2; ++i) pairs[i] = to_f16(p[2 * i], p[2 * i + 1]);
  }

  /// Raises the references of those heads whose logits have outgrown them. No head's bits depend on another head.
  __device__ __forceinline__ void raise() {
    Lane here = lane;
    asm volatile("" : "+r"(here.lane));  // or addresses that are seldom needed are kept from tile to tile, in registers
    const int head = 32 * here.warp + here.lane;
    const float peak = peak_of_head(here, [&](float x, int) { return x; });
    float weighted = 0;
    if constexpr (F::kScaledKeys) {
      const float exponents[2] = {exponent_of(key_units[0]), exponent_of(key_units[1])};
      weighted = peak_of_head(here, [&](float x, int i) { return x + exponents[i]; });
    }
    if (head < Columns) raise_head(head, peak, weighted);
    barrier_meet(kGroup + group, 128);
    lower_sums(group);
  }
  /// Largest `value(logit, i)` of this thread's head, by way of the weights' place, which the readers have left.
  template <class Value>
  __device__ __forceinline__ float peak_of_head(Lane here, Value value) {
    auto* place = reinterpret_cast<float*>(shared.weights[group]);  // [Columns][32 places of rows]
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int at = h / 2 * 4 + h % 2, head = h / 2 * 8 + 2 * here.column() + h % 2;
      const auto scaled = [&](float x) { return fmaf(x, args.scale_high, x * args.scale_low); };
      place[head * 32 + 8 * here.warp + here.row()] =
          fmaxf(value(scaled(logits[at]), 0), value(scaled(logits[at + 2]), 1));
    }
    barrier_meet(kGroup + group, 128);
    float peak = -INFINITY;
    const int head = 32 * here.warp + here.lane;
    if (head < Columns) {
#pragma unroll 8
      for (int i = 0; i < 32; ++i) peak = fmaxf(peak, place[head * 32 + (i + here.lane) % 32]);
    }
    barrier_meet(kGroup + group, 128);
    return peak;
  }
  __device__ __forceinline__ void raise_head(int head, float peak, float weighted_peak) {
    const float before = shared.largest[head];
    const float largest = peak - before > kLargestP ? ceilf(peak) : before;
    const float lower = step_down(before, largest);
    float rescale = lower;
    if constexpr (F::kScaledKeys) {
      float offset = shared.offset[head];
      if (before != largest) offset -= largest - before;
      const float unraised = offset, weighted = weighted_peak - largest;
      // However coarse the peak of large logits is: the weights use the offset alone.
      if (weighted > offset + kLargestWeight) offset = ceilf(weighted) - kWeightRoom;
      offset = fminf(fmaxf(offset, kLeastOffset), kMostOffset);
      rescale = step_down(unraised, offset);
      shared.offset[head] = offset;
      shared.weight_unit[head] = power_of_two(127 + kUnitShift - int(offset));
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
      float2 factors = {1 / sum, 1};
      if constexpr (F::kScaledKeys) {  // and half of the weights' unit each: its whole may be no FP32
        const float offset = shared.offset[head], half = truncf(offset * 0.5f);
        factors = {factors.x * exp2_approx(half), exp2_approx(offset - half)};
      }
      shared.factors[head] = factors;
    }
    barrier_arrive(kMath, kMathThreads);
  }
};

}  // namespace dsacore::cuda::many
