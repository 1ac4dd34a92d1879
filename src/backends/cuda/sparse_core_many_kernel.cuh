// Sparse core for 17 to 128 heads (it takes any number): one CTA attends with up to 48 heads of a row over a part of
// its keys, operands swapped: S^T[64 keys x N heads] = K Q^T, O^T[512 x N] += V^T P^T by wgmma, N a multiple of 8.
//
// What bounds it, in SM clocks for 64 keys and N = 48: the tensor cores 68 products of N / 2 = 1632. They reach that
// only with A in registers: from shared memory a product takes 16 + N / 4 = 28, all of it shared memory, to which a
// tile in FP16 would add 576 clocks of stores. So there is no such tile: math warps turn raw rows into fragments, keys
// and values each once a warpgroup (integer pipe 640), and shared memory works 1656 clocks, 328 of them for rows that
// arrive. 96 heads, 64 rows: 32 tiles x 1632 on 128 SMs = 26 us at 1980 MHz; the gather, read by two CTAs each, is 172
// MB from L2. Measured (H200): a tile takes 3650 clocks of fp8_ds_mla, for each of a sub-partition's two warps loads,
// converts, multiplies and waits in turn, about 75 clocks a product; the latents' way out takes another 13000.
//
// Warps: two warpgroups of math, which take turns at the scores of a tile and share its latents, 256 each; a third
// warpgroup has two warps that gather rows (bulk copies into slots of 32) and two that prepare their scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sparse_core_many.h"
#include "backends/cuda/sparse_core_many_operands.cuh"

namespace dsacore::cuda::many {

inline constexpr int kMathGroups = 2;
inline constexpr int kMathWarps = 4 * kMathGroups;
inline constexpr int kMathThreads = 32 * kMathWarps;
inline constexpr int kThreads = kMathThreads + 128;
inline constexpr int kProducers = 2, kHelpers = 2;                // 4 and none where there is nothing to prepare
inline constexpr int kMathRegisters = 232, kOtherRegisters = 40;  // of 168 each
inline constexpr int kSharedLimit = 227 * 1024;

/// The reference of a softmax is raised when a logit is 2^8 above it, so p stays below 2^8. Weights of V in units of
/// the keys stay below 2^14, and get a reference 2^6 above the largest when it is raised: FP16 then holds 20 more
/// powers of two below.
inline constexpr float kLargestP = 8, kLargestWeight = 14, kWeightRoom = 6;

/// Named barriers: `kWeights + g`: the weights that warpgroup g has written can be read; `kGroup + g`: of the
/// warpgroup's own. Nobody waits until weights have been read: g writes its next ones after it has met the other
/// group's, which were written after those had been read.
enum NamedBarrier { kWeights = 1, kGroup = 3, kMath = 5 };

template <class Layout, int Columns>
struct Shared {
  static constexpr int kSlotBytes = kSlotKeys * RowOperands<Layout>::kPitch;
  static constexpr int kTableBytes = RowOperands<Layout>::kTableBytes > 0 ? RowOperands<Layout>::kTableBytes : 16;
  static constexpr int kBlockBytes = Columns * 128;  // 64 elements of every head
  static constexpr int kFixedBytes = (kQueryRow / 64 + kMathGroups) * kBlockBytes + Columns * 128 + 1024;
  static constexpr int kSlots = std::min(10, (kSharedLimit - kFixedBytes) / (kSlotBytes + kTableBytes + 24));
  static_assert(kSlots >= 4, "two tiles are read at a time");

  alignas(1024) std::byte query[kQueryRow / 64][kBlockBytes];
  alignas(1024) std::byte weights[kMathGroups][kBlockBytes];
  alignas(128) std::byte slots[kSlots][kSlotBytes];
  alignas(16) std::byte tables[kSlots][kTableBytes];
  alignas(16) float largest[Columns];                  ///< reference of p, base 2, an integer
  alignas(16) float offset[Columns];                   ///< what the reference of V's weights lies above it
  alignas(16) float query_unit[Columns];               ///< what the head's FP16 query is to be multiplied by
  alignas(16) float rescale[kMathGroups][Columns];     ///< of latents summed before these weights
  alignas(16) float lower_sums[kMathGroups][Columns];  ///< of p summed before
  alignas(16) float peaks[4][2][Columns];              ///< one warpgroup at a time
  alignas(16) float sums[kMathWarps][Columns];
  alignas(16) SplitSum part[Columns];  ///< of this CTA, read by its cluster
  alignas(8) uint64_t full[kSlots], ready[kSlots], empty[kSlots];
  uint32_t raised[kMathGroups];  ///< whether the group's last tile has raised references; else rescale and lower_sums
                                 ///< are void

  static constexpr int kLatentPitch = kLatent + 4;  ///< floats; stores of pairs of four heads meet no bank twice
  static_assert(Columns * kLatentPitch * int(sizeof(float)) <= kSlots * kSlotBytes);
  static_assert(kManyHeadsSplits * Columns * int(sizeof(SplitSum)) <= kQueryRow / 64 * kBlockBytes);
  __device__ float* latents() { return reinterpret_cast<float*>(slots); }  ///< [Columns][kLatentPitch], at the end
};

/// What a CTA has to do.
struct Work {
  int64_t row;
  int head, heads;  ///< first, number
  int split;
  int64_t valid;
  int64_t first;  ///< key of the row's list
  int tiles;
};

__device__ __forceinline__ Work work_of(const ManyHeadsArgs& args, int unit) {
  const ManyHeadsPlan& plan = args.plan;
  // The splits are a cluster; groups of heads lie side by side, they read the same rows at the same time.
  const int split = unit % plan.splits, group = unit / plan.splits % plan.groups;
  Work work;
  work.row = unit / plan.splits / plan.groups;
  work.head = group * plan.group_heads;
  work.heads = min(plan.group_heads, args.query.heads - work.head);
  work.split = split;
  work.valid = args.valid(work.row);
  const int tiles = int((work.valid + kManyHeadsTile - 1) / kManyHeadsTile);
  const int first = tiles * split / plan.splits;
  work.first = int64_t(first) * kManyHeadsTile;
  work.tiles = tiles * (split + 1) / plan.splits - first;
  return work;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// 2^(from - to), 1 where they are equal, infinities included.
__device__ __forceinline__ float step_down(float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); }

// ---- producers and helpers ----

template <class Layout>
__device__ __forceinline__ void clear_rows(uint32_t slot, int first, int lane) {
  const int bytes = (kSlotKeys - first) * RowOperands<Layout>::kPitch;
#pragma unroll 1
  for (int at = lane * 16; at < bytes; at += 32 * 16)
    store_words4(slot + first * RowOperands<Layout>::kPitch + at, {0, 0, 0, 0});
  __syncwarp();
}

/// One warp gathers every `Producers`th slot. Only an elected lane issues copies (others would take turns), it gets the
/// ids by shuffles; they are loaded a slot ahead.
template <int Producers, class Layout, int Columns>
__device__ __forceinline__ void gather(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args, const Work& work,
                                       int producer, int lane) {
  using S = Shared<Layout, Columns>;
  constexpr int kPitch = RowOperands<Layout>::kPitch, kBatch = 8;
  const uint32_t slots = fixed_shared_address(shared.slots), full = fixed_shared_address(shared.full),
                 empty = fixed_shared_address(shared.empty);
  const int32_t* list = args.topk_rows.row(work.row) + work.first;
  const std::byte* cache = args.cache;
  const int left = int(work.valid - work.first);
  const auto id_in = [&](int nth) { return nth * kSlotKeys + lane < left ? list[nth * kSlotKeys + lane] : 0; };
  const bool elected = elect_one();
  int32_t next = id_in(producer);
  for (int nth = producer; nth < 2 * work.tiles; nth += Producers) {
    const int slot = nth % S::kSlots, use = nth / S::kSlots;
    const int rows = min(left - nth * kSlotKeys, kSlotKeys);
    const uint32_t to = slots + slot * S::kSlotBytes;
    const Barrier arrived{full + 8 * slot};
    const int32_t id = next;
    next = id_in(nth + Producers);
    if (use > 0) Barrier{empty + 8 * slot}.wait(uint32_t(use - 1) & 1);
    const auto from = reinterpret_cast<uint64_t>(cache + int64_t(id) * Layout::kRowBytes);
    if (rows == kSlotKeys) {
      if (elected) arrived.expect(kSlotKeys * Layout::kRowBytes);
#pragma unroll
      for (int i = 0; i < kSlotKeys; i += kBatch) {
        uint64_t row[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) row[j] = __shfl_sync(0xFFFFFFFFu, from, i + j);
        if (elected) {
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            bulk_copy(to + (i + j) * kPitch, reinterpret_cast<const void*>(row[j]), Layout::kRowBytes, arrived);
          }
        }
      }
    } else {
      clear_rows<Layout>(to, max(rows, 0), lane);  // 0 * NaN must not come up
      if (elected) arrived.expect(uint32_t(max(rows, 0) * Layout::kRowBytes));
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        const uint64_t row = __shfl_sync(0xFFFFFFFFu, from, i);
        if (elected) bulk_copy(to + i * kPitch, reinterpret_cast<const void*>(row), Layout::kRowBytes, arrived);
      }
    }
  }
}

template <class Layout, int Columns>
__device__ __forceinline__ void prepare_scales(Shared<Layout, Columns>& shared, const Work& work, int helper,
                                               int lane) {
  using S = Shared<Layout, Columns>;
  const uint32_t slots = fixed_shared_address(shared.slots), tables = fixed_shared_address(shared.tables),
                 full = fixed_shared_address(shared.full), ready = fixed_shared_address(shared.ready);
  for (int nth = helper; nth < 2 * work.tiles; nth += kHelpers) {
    const int slot = nth % S::kSlots;
    Barrier{full + 8 * slot}.wait(uint32_t(nth / S::kSlots) & 1);
    RowOperands<Layout>::make_table(slots + slot * S::kSlotBytes, tables + slot * S::kTableBytes, lane);
    __syncwarp();
    if (lane == 0) Barrier{ready + 8 * slot}.arrive();
  }
}

// ---- the query ----

/// 16 dims of a BF16 query, times `factor`, as FP16 pairs.
__device__ __forceinline__ void scale_query(const uint4 (&words)[2], float factor, uint32_t (&pairs)[8]) {
  const uint32_t bits[8] = {words[0].x, words[0].y, words[0].z, words[0].w,
                            words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    pairs[i] = to_f16(float_of(bits[i] << 16) * factor, float_of(bits[i] & 0xFFFF0000u) * factor);
}
__device__ __forceinline__ uint32_t largest_magnitude(uint32_t bits) {
  return max((bits << 16) & 0x7FFFFFFFu, bits & 0x7FFF0000u);
}

/// A warp writes a head's BF16 query: latents in FP16 times a power of two that brings the largest to 2^14, pe as it
/// is.
template <class Layout, int Columns>
__device__ __forceinline__ void store_plain_query(Shared<Layout, Columns>& shared, const uint4 (&words)[2],
                                                  const uint4 (&pe)[2], int column, int lane) {
  uint32_t largest = 0;
  for (const uint4& w : words) {
    largest = max(largest, max(max(largest_magnitude(w.x), largest_magnitude(w.y)),
                               max(largest_magnitude(w.z), largest_magnitude(w.w))));
  }
  const uint32_t exponent = max(__reduce_max_sync(0xFFFFFFFFu, largest) >> 23, 15u);
  uint32_t pairs[8];
  scale_query(words, float_of((268 - exponent) << 23), pairs);
  if (lane == 0) shared.query_unit[column] = float_of((exponent - 14) << 23);
  const uint32_t swizzle = uint32_t(column % 8 * 16), row = uint32_t(column * 128);
  RowOperands<Layout>::store_query(shared_address(shared.query[lane / 4]) + row, swizzle, lane, pairs);
  if (lane < kPe / 16) {
    const uint32_t at = shared_address(shared.query[kLatent / 64]) + row;
    for (int i = 0; i < 2; ++i) store_words4(at + (uint32_t(32 * lane + 16 * i) ^ swizzle), pe[i]);
  }
}

/// A lane writes 16 dims of a head's e4m3 query.
template <class Layout, int Columns>
__device__ __forceinline__ void store_e4m3_query(Shared<Layout, Columns>& shared, uint4 codes, int column, int unit) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = low_e4m3_to_f16(words[i]);
    pairs[2 * i + 1] = high_e4m3_to_f16(words[i]);
  }
  if (unit >= kLatent / 16 && RowOperands<Layout>::kPeUnit != 1) {
    const uint32_t factor = to_f16(RowOperands<Layout>::kPeUnit, RowOperands<Layout>::kPeUnit);
#pragma unroll
    for (uint32_t& pair : pairs) pair = multiply_f16(pair, factor);
  }
  RowOperands<Layout>::store_query(shared_address(shared.query[unit / 4]) + uint32_t(column * 128),
                                   uint32_t(column % 8 * 16), unit, pairs);
}

/// A warp takes every eighth head, and asks for all of its bytes before it waits for the first.
template <class Layout, int Columns>
__device__ __forceinline__ void load_query(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args, const Work& work,
                                           int warp, int lane) {
  constexpr bool kPlain = RowOperands<Layout>::kPlainPe;
  constexpr int kHeads = Columns / kMathWarps, kWords = kPlain ? 2 : 1;
  uint4 latent[kHeads][kWords], pe[kHeads][kWords];
  const auto* first = reinterpret_cast<const uint4*>(args.query.at(work.row, work.head));
  constexpr int kHeadWords = kQueryRow * (kPlain ? 2 : 1) / 16, kPeWords = kLatent * (kPlain ? 2 : 1) / 16;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int column = warp + i * kMathWarps;
    const bool real = column < work.heads;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint4* from = first + column * kHeadWords + kWords * lane + j;
      latent[i][j] = real ? from[0] : uint4{};
      pe[i][j] = real && lane < kPe / 16 ? from[kPeWords] : uint4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int column = warp + i * kMathWarps;
    if constexpr (kPlain) {
      store_plain_query(shared, latent[i], pe[i], column, lane);
    } else {
      store_e4m3_query(shared, latent[i][0], column, lane);
      if (lane < kPe / 16) store_e4m3_query(shared, pe[i][0], column, kLatent / 16 + lane);
    }
  }
}

// ---- math ----

/// Keeps the compiler from reading results of wgmma before the wait for them.
template <int Count>
__device__ __forceinline__ void settle(float (&d)[Count]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

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
    settle(logits);
    if constexpr (F::kPlainPe) settle(pe);

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
        const float p = exp2_fast(x);
        sums[h] += p;
        x = F::kScaledKeys ? exp2_fast(x + (exponents[i] - offset[h])) : p;
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
    for (auto& block : latents) settle(block);
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
        units[0] = exp2_fast(half);
        units[1] = exp2_fast(offset[h] - half);
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

// ---- output ----

/// What each part of the row counts, of its heads: into the place of the query. Part 0 writes the lse.
template <class Layout, int Columns>
__device__ __forceinline__ void weigh_parts(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                            const Work& work, int thread) {
  const int parts = args.plan.splits;
  auto* all = reinterpret_cast<SplitSum*>(shared.query);  // [parts][Columns]
  const uint32_t mine = shared_address(shared.part);
  for (int i = thread; i < parts * Columns; i += kMathThreads) {
    const float2 sum =
        load_from_cluster2(address_in(mine + uint32_t(i % Columns * sizeof(SplitSum)), uint32_t(i / Columns)));
    all[i] = {sum.x, sum.y};
  }
  barrier_meet(kMath, kMathThreads);
  if (thread < Columns) {
    float largest = -INFINITY, sum = 0;
    for (int part = 0; part < parts; ++part) {
      const SplitSum& s = all[part * Columns + thread];
      if (s.sum != 0) largest = fmaxf(largest, s.largest);  // NaN counts
    }
    for (int part = 0; part < parts; ++part) {
      SplitSum& s = all[part * Columns + thread];
      s.sum = s.sum != 0 ? s.sum * step_down(s.largest, largest) : 0;
      sum += s.sum;
    }
    for (int part = 0; part < parts; ++part) {
      SplitSum& s = all[part * Columns + thread];
      s.sum = sum != 0 ? s.sum / sum : 0;
    }
    if (work.split == 0 && thread < work.heads) {
      args.lse(work.row, work.head + thread) = sum != 0 ? natural_lse(largest, sum) : -INFINITY;
    }
  }
  barrier_meet(kMath, kMathThreads);
}

/// Adds the parts of a row in their order, each CTA of the cluster its share of heads and latents, and rounds once.
template <class Layout, int Columns>
__device__ __forceinline__ void write_latents(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                              const Work& work, int thread) {
  using S = Shared<Layout, Columns>;
  constexpr int kQuads = kLatent / 4, kInFlight = 8;
  const int parts = args.plan.splits;
  parts > 1 ? cluster_barrier() : barrier_meet(kMath, kMathThreads);
  weigh_parts(shared, args, work, thread);
  const auto* all = reinterpret_cast<const SplitSum*>(shared.query);
  const uint32_t here = shared_address(shared.latents());
  const float scale = args.latent_scale;
  const int quads = work.heads * kQuads, last = quads * (work.split + 1) / parts;
  for (int i = quads * work.split / parts + thread; i < last; i += kMathThreads) {
    const int head = i / kQuads, quad = i % kQuads;
    const uint32_t at = here + uint32_t((head * S::kLatentPitch + quad * 4) * 4);
    float4 sum = {0, 0, 0, 0};
    for (int first = 0; first < parts; first += kInFlight) {
      float4 value[kInFlight];
      float weight[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        weight[j] = first + j < parts ? all[(first + j) * Columns + head].sum : 0;
        value[j] = {0, 0, 0, 0};
        if (weight[j] != 0) value[j] = load_from_cluster4(address_in(at, uint32_t(first + j)));
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        sum.x = fmaf(weight[j], value[j].x, sum.x);
        sum.y = fmaf(weight[j], value[j].y, sum.y);
        sum.z = fmaf(weight[j], value[j].z, sum.z);
        sum.w = fmaf(weight[j], value[j].w, sum.w);
      }
    }
    auto* to = reinterpret_cast<__nv_bfloat162*>(args.latent.row(work.row, work.head + head)) + 2 * quad;
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(sum.x * scale, sum.y * scale),
                                     __floats2bfloat162_rn(sum.z * scale, sum.w * scale)};
    *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(pairs);
  }
  if (parts > 1) cluster_barrier();  // until then others may read here
}

template <class Layout, int Columns>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ ManyHeadsArgs args) {
  using S = Shared<Layout, Columns>;
  extern __shared__ __align__(1024) std::byte memory[];
  S& shared = *reinterpret_cast<S*>(memory);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < S::kSlots; ++slot) {
      Barrier{shared_address(&shared.full[slot])}.init(1);
      Barrier{shared_address(&shared.ready[slot])}.init(1);
      Barrier{shared_address(&shared.empty[slot])}.init(kMathWarps);
    }
    publish_barriers();
    shared.raised[0] = shared.raised[1] = 0;
  }
  for (int i = int(threadIdx.x); i < Columns; i += kThreads) shared.largest[i] = shared.offset[i] = -INFINITY;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();
  const Work work = work_of(args, int(blockIdx.x));

  if (warp >= kMathWarps) {
    give_registers<kOtherRegisters>();
    const int other = warp - kMathWarps;
    if constexpr (RowOperands<Layout>::kTableBytes == 0) {
      gather<kProducers + kHelpers>(shared, args, work, other, lane);
    } else if (other < kProducers) {
      gather<kProducers>(shared, args, work, other, lane);
    } else {
      prepare_scales(shared, work, other - kProducers, lane);
    }
    return;
  }
  take_registers<kMathRegisters>();
  if (work.tiles > 0) {
    load_query(shared, args, work, warp, lane);
    fence_async_proxy();
    barrier_meet(kMath, kMathThreads);
    Math<Layout, Columns>(shared, args, work, warp / 4, Lane{warp % 4, lane}).run();
  } else if (threadIdx.x < Columns) {
    shared.part[threadIdx.x] = {0, 0};
  }
  write_latents(shared, args, work, int(threadIdx.x));
}

}  // namespace dsacore::cuda::many

namespace dsacore::cuda {

template <class Layout>
void ManyHeadsKernel<Layout>::prepare() {
  allow_shared(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>), true);
  allow_shared(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>), true);
}

template <class Layout>
void ManyHeadsKernel<Layout>::launch(const ManyHeadsArgs& args, const Workspace& workspace) {
  const auto enqueue = [&](auto kernel, size_t shared_bytes) {
    const LaunchShape shape = {.grid = unsigned(args.plan.ctas(int(args.valid.extent(0)))),
                               .block = many::kThreads,
                               .shared_bytes = shared_bytes,
                               .cluster = args.plan.splits};
    cuda::launch(kernel, shape, workspace, args);
  };
  args.plan.columns == 24 ? enqueue(many::attend<Layout, 24>, sizeof(many::Shared<Layout, 24>))
                          : enqueue(many::attend<Layout, 48>, sizeof(many::Shared<Layout, 48>));
}

}  // namespace dsacore::cuda
