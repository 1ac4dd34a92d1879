// Sparse core for many heads: a warpgroup that multiplies its share of a tile's dims, adds what the other warpgroup has
// of its share of the heads, and makes of those logits the weights of the tile's values.
#pragma once

#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"

namespace dsacore::cuda::many {

template <class Layout, int Columns, int Group>
struct Scores : Tiles<Layout, Columns> {
  using T = Tiles<Layout, Columns>;
  using T::base;
  using T::kAccumulators;
  using T::lane;
  using T::shared;
  using T::work;
  using typename T::F;
  using typename T::F16;
  using typename T::S;

  static constexpr int kFirstPair = Group == 0 ? 0 : F::kFirstShare,
                       kEndPair = Group == 0 ? F::kFirstShare : kKeyPairs;  ///< of products
  static constexpr int kEndLatents = kEndPair < kLatentPairs ? kEndPair : kLatentPairs;
  static constexpr int kFirstBlock = first_block(Columns, Group),
                       kEndBlock = first_block(Columns, Group + 1);  ///< of 8 heads
  static constexpr int kLogits = 4 * (kEndBlock - kFirstBlock), kHeads = kLogits / 2;
  static constexpr int kFirstHead = 8 * kFirstBlock, kGroupHeads = 8 * (kEndBlock - kFirstBlock);

  const ManyHeadsArgs& args;

  float partial[kAccumulators];  ///< of the logits of all heads: this group's dims
  float logits[kLogits];         ///< of this group's heads, before the scale that makes them base 2
  float sums[kHeads] = {};       ///< of p, over this thread's keys
  float key_units[2] = {};       ///< 2^exponent of the keys of the current tile, rows r and r + 8

  __device__ __forceinline__ Scores(S& shared, const ManyHeadsArgs& args, const Work& work, Lane lane)
      : T(shared, work, lane), args(args) {}

  __device__ __forceinline__ void run() {
    for (int tile = 0; tile < work.tiles; ++tile) {
      multiply_dims(tile);
      exchange(tile);
      if (tile >= kWeightPlaces) {  // their place has been read
        Barrier{base + uint32_t(offsetof(S, read)) + 8 * (tile % kWeightPlaces)}.wait(
            uint32_t(tile / kWeightPlaces - 1) & 1);
      }
      weigh(tile % kWeightPlaces);
    }
    finish();
  }

  /// This group's part of a tile's logits.
  __device__ __forceinline__ void multiply_dims(int tile) {
    const int nth = 2 * tile + lane.warp / 2;
    const uint32_t slot = T::slot_of(nth);
    const Barrier ready{base + uint32_t(F::kTableBytes > 0 ? offsetof(S, ready) : offsetof(S, full)) + 8 * slot};
    ready.wait(uint32_t(nth / S::kSlots) & 1);
    const uint32_t table = T::table_of(slot);
    typename F::Keys keys(T::rows_of(slot), table, lane);
    for (int pair = kFirstPair; pair < kFirstPair + kPairsAhead; ++pair) keys.fetch(pair);
    uint32_t a[kOpenKeys][4];
    if constexpr (F::kPlainPe) {
      multiply<2 * kFirstPair, 2 * kEndLatents>(keys, a);
      scale_keys(table);
      if constexpr (kEndPair > kLatentPairs) multiply<2 * kLatentPairs, 2 * kEndPair>(keys, a);
    } else {
      multiply<2 * kFirstPair, 2 * kEndPair>(keys, a);
    }
    wgmma_wait<0>();
    wgmma_settle(partial);
  }

  /// Adds products of 16 dims.
  template <int First, int Last>
  __device__ __forceinline__ void multiply(typename F::Keys& keys, uint32_t (&a)[kOpenKeys][4]) {
    uint32_t query = base + uint32_t(offsetof(S, query));
    asm volatile("" : "+r"(query));  // or the addresses of all products are kept from tile to tile, in registers
    const uint64_t query_tile = swizzled_tile(query);
    multiply_made<First, Last, kEndPair>(keys, a, [&](int product, const uint32_t(&fragment)[4]) {
      const uint64_t dims = query_tile + uint64_t(product / 4 * S::kBlockBytes / 16 + product % 4 * 2);
      if (product >= 2 * kLatentPairs && F::kPlainPe) {
        WgmmaShape<Operands::kBf16, Columns>::registers(partial, fragment, dims, 1);
      } else {
        F16::registers(partial, fragment, dims, product > 2 * kFirstPair);
      }
    });
  }

  /// The products of latents in units of the logits: pe, which has no scale, is added to them.
  __device__ __forceinline__ void scale_keys(uint32_t table) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 16 * lane.warp + 8 * i + lane.row();
      key_units[i] = float_of(load_word(table + F::kUnitsAt + 4 * (key % kSlotKeys)));
    }
    wgmma_wait<0>();
    wgmma_settle(partial);
    float units[T::kHeads];
    T::load_heads(shared.query_unit, units);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      partial[i] = partial[i] * units[i / 4 * 2 + i % 2] * key_units[i / 2 % 2];
    }
  }

  /// Sends the other group its heads' part, and adds what comes from it. Two places and barriers by turns: whoever
  /// sends again to one of them has had an answer that was given after the last contents were taken.
  __device__ __forceinline__ void exchange(int tile) {
    const int turn = tile % 2;
    const uint32_t place =
        base + uint32_t(offsetof(S, partials)) + turn * S::kPartialBytes + uint32_t((32 * lane.warp + lane.lane) * 16);
    const uint32_t sent = base + uint32_t(offsetof(S, sent)) + 8 * turn;
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j) {
      if (j >= kFirstBlock && j < kEndBlock) continue;
      store_words4(place + j * 2048, {__float_as_uint(partial[4 * j]), __float_as_uint(partial[4 * j + 1]),
                                      __float_as_uint(partial[4 * j + 2]), __float_as_uint(partial[4 * j + 3])});
    }
    __syncwarp();
    if (lane.lane == 0) Barrier{sent + 16 * Group}.arrive();
    Barrier{sent + 16 * (1 - Group)}.wait(uint32_t(tile / 2) & 1);
#pragma unroll
    for (int j = kFirstBlock; j < kEndBlock; ++j) {
      const uint4 other = load_words4(place + j * 2048);
      float* own = logits + 4 * (j - kFirstBlock);
      own[0] = partial[4 * j] + float_of(other.x), own[1] = partial[4 * j + 1] + float_of(other.y);
      own[2] = partial[4 * j + 2] + float_of(other.z), own[3] = partial[4 * j + 3] + float_of(other.w);
    }
    const int left = int(work.valid - work.first) - tile * kManyHeadsTile;
    if (left >= kManyHeadsTile) return;
    const float masked = kMasked / args.scale_high;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      if (16 * lane.warp + i / 2 % 2 * 8 + lane.row() >= left) logits[i] = masked;
    }
  }

  /// Weights of a tile from its logits, into one of their places in shared memory. They are made before it is known
  /// that the references do for them, and once more where those had to be raised.
  __device__ __forceinline__ void weigh(int at) {
    float added[kHeads];  // of p, of this tile
    bool raised = false;
    while (true) {
      const bool outgrown = store_weights(at, added);
      if (raised || !barrier_any(kGroup + Group, 128, outgrown)) break;
      raise(at);
      raised = true;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] += added[h];
    if (lane.warp == 0 && lane.lane == 0) shared.raised[at][Group] = raised;
    fence_async_proxy();
    __syncwarp();
    if (lane.lane == 0) Barrier{base + uint32_t(offsetof(S, written)) + 8 * at}.arrive();
  }

  /// P^T as a K-major B operand: [head][key], 128 bytes a head, swizzled. Returns whether a logit of this thread may be
  /// too far above a reference: what raise_head goes by is one, a NaN and what is next to one may be.
  __device__ __forceinline__ bool store_weights(int at, float (&added)[kHeads]) const {
    const int row = lane.lane % 8,
              tile = lane.lane / 8;  // 8 x 8 tiles: keys 0-7, 8-15 of the warp, then of the next 8 heads
    const uint32_t to = base + uint32_t(offsetof(S, weights)) + at * S::kBlockBytes +
                        uint32_t((kFirstHead + tile / 2 * 8 + row) * 128) +
                        (uint32_t((2 * lane.warp + tile % 2) * 16) ^ uint32_t(row * 16));
    float largest_added = 0;
    uint32_t largest_weights = 0;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < kEndBlock - kFirstBlock; ++j) {
      make_weights(j, added, pairs + j % 2 * 2);
      largest_added = fmaxf(largest_added, fmaxf(added[2 * j], added[2 * j + 1]));
      for (int i = 0; i < 2; ++i) largest_weights = larger_f16(largest_weights, pairs[j % 2 * 2 + i]);
      if (j % 2 == 1) {
        store_matrices_transposed(to + j / 2 * 2048, pairs);
      } else if (kFirstBlock + j + 1 == kEndBlock) {
        store_matrices_transposed(to + j / 2 * 2048, {pairs[0], pairs[1]});
      }
    }
    return largest_added > kNearlyLargestP ||
           (F::kScaledKeys && max(largest_weights << 16, largest_weights) >= kNearlyLargestWeight);
  }

  /// What a thread has of the weights of 8 heads, and their sums of p.
  __device__ __forceinline__ void make_weights(int j, float (&added)[kHeads], uint32_t* pairs) const {
    const int head = T::head_of(2 * (kFirstBlock + j));
    const float2 largest = *reinterpret_cast<const float2*>(shared.largest + head);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = logits[4 * j + i], reference = i % 2 == 0 ? largest.x : largest.y;
      p[i] = exp2_approx(fmaf(x, args.scale_high, fmaf(x, args.scale_low, -reference)));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) added[2 * j + i] = p[i] + p[2 + i];
    if constexpr (F::kScaledKeys) {
      const float2 unit = *reinterpret_cast<const float2*>(shared.weight_unit + head);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = p[i] * (key_units[i / 2] * (1.0f / (1 << kUnitShift))) * (i % 2 == 0 ? unit.x : unit.y);
      }
    }
    for (int i = 0; i < 2; ++i) pairs[i] = to_f16(p[2 * i], p[2 * i + 1]);
  }

  /// Raises the references of those heads whose logits have outgrown them. No head's bits depend on another head.
  __device__ __forceinline__ void raise(int at) {
    const float peak = peak_of_head(at, [&](float x, int) { return x; });
    float weighted = 0;
    if constexpr (F::kScaledKeys) {
      const float exponents[2] = {exponent_of(key_units[0]), exponent_of(key_units[1])};
      weighted = peak_of_head(at, [&](float x, int i) { return x + exponents[i]; });
    }
    const int head = 32 * lane.warp + lane.lane;
    if (head < kGroupHeads) raise_head(at, kFirstHead + head, peak, weighted);
    barrier_meet(kGroup + Group, 128);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] *= shared.lower_sums[T::head_of(2 * kFirstBlock + h)];
  }
  /// Largest `value(logit, i)` of this thread's head of the group, by way of the weights' place, which the readers have
  /// left.
  template <class Value>
  __device__ __forceinline__ float peak_of_head(int at, Value value) {
    auto* place = reinterpret_cast<float*>(shared.weights[at]) + kFirstHead * 32;  // [heads][32 places of rows]
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int i = h / 2 * 4 + h % 2;
      const auto scaled = [&](float x) { return fmaf(x, args.scale_high, x * args.scale_low); };
      place[T::head_of(h) * 32 + 8 * lane.warp + lane.row()] =
          fmaxf(value(scaled(logits[i]), 0), value(scaled(logits[i + 2]), 1));
    }
    barrier_meet(kGroup + Group, 128);
    float peak = -INFINITY;
    const int head = 32 * lane.warp + lane.lane;
    if (head < kGroupHeads) {
#pragma unroll 8
      for (int i = 0; i < 32; ++i) peak = fmaxf(peak, place[head * 32 + (i + lane.lane) % 32]);
    }
    barrier_meet(kGroup + Group, 128);
    return peak;
  }
  __device__ __forceinline__ void raise_head(int at, int head, float peak, float weighted_peak) {
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
    shared.lower_sums[head] = lower;
    shared.rescale[at][head] = rescale;
  }

  /// The softmax's denominators.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], mask);
      if (lane.row() == 0) shared.sums[lane.warp][T::head_of(2 * kFirstBlock + h)] = sums[h];
    }
    barrier_meet(kGroup + Group, 128);
    if (32 * lane.warp + lane.lane >= kGroupHeads) return;
    const int head = kFirstHead + 32 * lane.warp + lane.lane;
    float sum = shared.sums[0][head];
    for (int warp = 1; warp < 4; ++warp) sum += shared.sums[warp][head];
    shared.part[head] = {shared.largest[head], sum};
    float2 factors = {1 / sum, 1};
    if constexpr (F::kScaledKeys) {  // and half of the weights' unit each: its whole may be no FP32
      const float offset = shared.offset[head], half = truncf(offset * 0.5f);
      factors = {factors.x * exp2_approx(half), exp2_approx(offset - half)};
    }
    shared.factors[head] = factors;
  }
};

}  // namespace dsacore::cuda::many
