// Sparse core for many heads: a math warpgroup's scores, softmax and sums over its keys.
#pragma once

#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"

namespace dsacore::cuda::many {

/// A warp's part of a math warpgroup. Accumulators are indexed [4 j + 2 i + e]: row 8 i + r of the warp's 16, head 8 j
/// + 2 c + e (r, c = lane / 4, lane % 4); what belongs to a head alone [2 j + e].
template <class Layout, int Columns>
struct Math {
  using S = Shared<Layout, Columns>;
  using F = RowOperands<Layout>;
  using F16 = WgmmaShape<Operands::kF16, Columns>;
  static constexpr int kAccumulators = Columns / 2;
  static constexpr int kHeads = Columns / 4;

  S& shared;
  const ManyHeadsArgs& args;
  const Work& work;
  const int group;
  const Lane lane;
  const uint32_t base;  ///< address of `shared`; one register for all that is addressed by number

  float latents[4][kAccumulators] = {};  ///< O^T of M blocks of the group's 256 latents
  float logits[kAccumulators];           ///< base 2, of the group's current tile
  float sums[kHeads] = {};               ///< of p, over this thread's keys

  __device__ __forceinline__ Math(S& shared, const ManyHeadsArgs& args, const Work& work, int group, Lane lane)
      : shared(shared), args(args), work(work), group(group), lane(lane), base(fixed_shared_address(&shared)) {}

  __device__ __forceinline__ int head_of(int h) const { return h / 2 * 8 + 2 * lane.column() + h % 2; }
  /// A head's values of [Columns] in shared memory.
  __device__ __forceinline__ void load_heads(const float* from, float (&to)[kHeads]) const {
#pragma unroll
    for (int j = 0; j < kHeads / 2; ++j) {
      const float2 both = *reinterpret_cast<const float2*>(from + head_of(2 * j));
      to[2 * j] = both.x, to[2 * j + 1] = both.y;
    }
  }
  static __device__ __forceinline__ uint32_t slot_of(int nth) { return uint32_t(nth % S::kSlots); }
  __device__ __forceinline__ uint32_t rows_of(uint32_t slot) const {
    return base + offsetof(S, slots) + slot * S::kSlotBytes;
  }
  __device__ __forceinline__ uint32_t table_of(uint32_t slot) const {
    return base + offsetof(S, tables) + slot * S::kTableBytes;
  }

  /// The tiles in turns: scores and weights of the group's own, latents of all.
  __device__ __forceinline__ void run() {
    int tile = group;
    for (; tile < work.tiles; tile += kMathGroups) {
      score(tile);
      if (tile > 0) {
        barrier_meet(kWeights + (group ^ 1), kMathThreads);
        accumulate(tile - 1, group ^ 1);
      }
      weigh();
      accumulate(tile, group);
    }
    if (tile == work.tiles) {  // the last tile is the other group's
      barrier_meet(kWeights + (group ^ 1), kMathThreads);
      accumulate(tile - 1, group ^ 1);
    }
    finish();
  }

  /// Logits of a tile.
  __device__ __forceinline__ void score(int tile) {
    const int nth = 2 * tile + lane.warp / 2;
    const uint32_t slot = slot_of(nth);
    const Barrier ready{base + uint32_t(F::kTableBytes > 0 ? offsetof(S, ready) : offsetof(S, full)) + 8 * slot};
    ready.wait(uint32_t(nth / S::kSlots) & 1);
    const uint32_t table = table_of(slot);
    typename F::Keys keys(rows_of(slot), table, lane);

    Fragments a[2];
    float pe[F::kPlainPe ? kAccumulators : 1];
    const uint64_t query_tile = swizzled_tile(base + offsetof(S, query));
    const uint64_t pe_tile = query_tile + kSets * S::kBlockBytes / 16;
    keys.load_pe(a[1]);
    keys.fetch(0);
#pragma unroll
    for (int set = -1; set < kSets; ++set) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma_fence();
        if (set >= 0) {
          F16::registers(logits, a[set % 2][step], query_tile + set * S::kBlockBytes / 16 + 2 * step,
                         !F::kPlainPe || set + step > 0);
        } else if constexpr (F::kPlainPe) {
          WgmmaShape<Operands::kBf16, Columns>::registers(pe, a[1][step], pe_tile + 2 * step, step > 0);
        } else {
          F16::registers(logits, a[1][step], pe_tile + 2 * step, step > 0);
        }
        wgmma_commit();
        wgmma_wait<4>();  // of the set before, products up to this step
        if (set + 1 < kSets) keys.make(set + 1, step, a[(set + 1) % 2][step]);
      }
      if (set + 2 < kSets) keys.fetch(set + 2);
    }
    wgmma_wait<0>();
    wgmma_settle(logits);
    if constexpr (F::kPlainPe) wgmma_settle(pe);

    const int left = int(work.valid - work.first) - tile * kManyHeadsTile;
    float units[kHeads];
    if constexpr (F::kScaledKeys) load_heads(shared.query_unit, units);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 16 * lane.warp + 8 * i + lane.row();
      float key_unit = 1;
      if constexpr (F::kScaledKeys) {
        exponents[i] = float_of(load_word(table + F::kExponentsAt + 4 * (key % kSlotKeys)));
        key_unit = float_of(uint32_t(int(exponents[i]) + 127) << 23);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float& x = logits[h / 2 * 4 + 2 * i + h % 2];
        float dot = x;
        static_assert(F::kScaledKeys == F::kPlainPe);
        if constexpr (F::kScaledKeys) dot = fmaf(dot * units[h], key_unit, pe[h / 2 * 4 + 2 * i + h % 2]);
        x = fmaf(dot, args.scale_high, dot * args.scale_low);
      }
    }
    if (left >= kManyHeadsTile) return;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      if (16 * lane.warp + i / 2 % 2 * 8 + lane.row() >= left) logits[i] = -INFINITY;
    }
  }

  /// Weights of a tile from its logits, into the group's tile of shared memory, for both groups.
  __device__ __forceinline__ void weigh() {
    float largest[kHeads], offset[kHeads];
    load_heads(shared.largest, largest);
    if constexpr (F::kScaledKeys) load_heads(shared.offset, offset);
    follow();
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
    const bool raised = barrier_any(kGroup + group, 128, over);
    if (raised) raise(largest, offset);

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
    barrier_arrive(kWeights + group, kMathThreads);
    barrier_meet(kGroup + group, 128);
  }

  /// Raises the references of those heads whose logits have outgrown them. No head's bits depend on another head.
  __device__ __forceinline__ void raise(float (&largest)[kHeads], float (&offset)[kHeads]) {
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
        shared.peaks[lane.warp][0][head_of(h)] = peak;
        if constexpr (F::kScaledKeys) shared.peaks[lane.warp][1][head_of(h)] = weighted;
      }
    }
    barrier_meet(kGroup + group, 128);
    const bool writer = lane.warp == 0 && lane.row() == 0;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float peak[2];
#pragma unroll
      for (int kind = 0; kind < (F::kScaledKeys ? 2 : 1); ++kind) {
        peak[kind] = shared.peaks[0][kind][head_of(h)];
        for (int warp = 1; warp < 4; ++warp) peak[kind] = fmaxf(peak[kind], shared.peaks[warp][kind][head_of(h)]);
      }
      const float before = largest[h];
      if (peak[0] - largest[h] > kLargestP) largest[h] = ceilf(peak[0]);
      const float lower = step_down(before, largest[h]);
      sums[h] *= lower;
      float rescale = lower;
      if constexpr (F::kScaledKeys) {
        if (before != largest[h]) offset[h] -= largest[h] - before;
        const float unraised = offset[h];
        // However coarse the peak of large logits is: the weights use the offset alone.
        if (peak[1] - largest[h] > offset[h] + kLargestWeight) offset[h] = ceilf(peak[1] - largest[h]) - kWeightRoom;
        rescale = step_down(unraised, offset[h]);
      }
      if (writer) {
        shared.largest[head_of(h)] = largest[h];
        if constexpr (F::kScaledKeys) shared.offset[head_of(h)] = offset[h];
        shared.lower_sums[group][head_of(h)] = lower;
        shared.rescale[group][head_of(h)] = rescale;
      }
    }
  }

  /// Brings this thread's sums to the references of the other group's last tile.
  __device__ __forceinline__ void follow() {
    if (shared.raised[group ^ 1] == 0) return;
    float lower[kHeads];
    load_heads(shared.lower_sums[group ^ 1], lower);
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

  /// Adds a tile's values, weighted by group `source`.
  __device__ __forceinline__ void accumulate(int tile, int source) {
    if (shared.raised[source] != 0) {
      float factors[kHeads];
      load_heads(shared.rescale[source], factors);
#pragma unroll
      for (auto& block : latents) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) block[i] *= factors[i / 4 * 2 + i % 2];
      }
    }
    const uint32_t slot[2] = {slot_of(2 * tile), slot_of(2 * tile + 1)};
    const uint32_t rows[2] = {rows_of(slot[0]), rows_of(slot[1])}, scales[2] = {table_of(slot[0]), table_of(slot[1])};
    typename F::Values values(rows, scales, group, lane);
    const uint64_t weight_tile = swizzled_tile(base + uint32_t(offsetof(S, weights)) + source * S::kBlockBytes);
    Fragments a[2];
    values.fetch(0);
#pragma unroll
    for (int set = 0; set < kValueSets; ++set) {
#pragma unroll
      for (int step = 0; step < 4; ++step) values.make(set, step, a[set % 2][step]);
      if (set + 1 < kValueSets) values.fetch(set + 1);
      wgmma_fence();
#pragma unroll
      for (int product = 0; product < 4; ++product) {
        F16::registers(latents[F::value_block(set, product)], a[set % 2][product],
                       weight_tile + 2 * F::value_step(set, product), 1);
      }
      wgmma_commit();
      if (set + 1 < kValueSets) wgmma_wait<1>();
    }
    __syncwarp();  // all lanes have their fragments
    if (lane.lane == 0) {
      for (const uint32_t s : slot) Barrier{base + uint32_t(offsetof(S, empty)) + 8 * s}.arrive();
    }
    wgmma_wait<0>();
    for (auto& block : latents) wgmma_settle(block);
  }

  /// The softmax's denominators; normalised latents into shared memory, where the rows were.
  __device__ __forceinline__ void finish() {
    float largest[kHeads], offset[kHeads];
    load_heads(shared.largest, largest);
    if constexpr (F::kScaledKeys) load_heads(shared.offset, offset);
    if ((work.tiles - 1) % kMathGroups != group) follow();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], mask);
      if (lane.row() == 0) shared.sums[4 * group + lane.warp][head_of(h)] = sums[h];
    }
    barrier_meet(kMath, kMathThreads);  // now nobody reads rows any more
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = shared.sums[0][head_of(h)];
#pragma unroll
      for (int warp = 1; warp < kMathWarps; ++warp) sum += shared.sums[warp][head_of(h)];
      if (group == 0 && lane.warp == 0 && lane.row() == 0) shared.part[head_of(h)] = {largest[h], sum};
      const float factor = 1 / sum;
      float units[2] = {1, 1};  // of the latents; their product may be no FP32
      if constexpr (F::kScaledKeys) {
        const float half = truncf(offset[h] * 0.5f);
        units[0] = exp2_approx(half);
        units[1] = exp2_approx(offset[h] - half);
      }
      float* to = shared.latents() + head_of(h) * S::kLatentPitch + 256 * group;
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const int at = h / 2 * 4 + h % 2;
        float2 pair = {latents[block][at] * factor, latents[block][at + 2] * factor};
        if constexpr (F::kScaledKeys) pair = {pair.x * units[0] * units[1], pair.y * units[0] * units[1]};
        *reinterpret_cast<float2*>(to + F::latent_of(block, lane, 0)) = pair;
      }
    }
  }

  float exponents[2] = {};  ///< of the keys of the current tile, rows r and r + 8
};

}  // namespace dsacore::cuda::many
