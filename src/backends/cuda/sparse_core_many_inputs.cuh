// Sparse core for many heads: how rows, their scales and the query come into shared memory.
#pragma once

#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/sparse_core_many_shared.cuh"
#include "backends/cuda/sparse_core_no_key.cuh"

namespace dsacore::cuda::many {

// ---- producers and helpers ----

/// One warp gathers every `Producers`th slot. Only an elected lane issues copies (others would take turns), it gets the
/// addresses by shuffles. Half of the lanes have the ids of one slot, half of the next; they are loaded two slots
/// ahead, the first as if the row had all keys that it can have.
template <int Producers, class Layout, int Columns>
__device__ __forceinline__ void gather(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args, const Place& place,
                                       int valid, int producer, int lane) {
  using S = Shared<Layout, Columns>;
  static_assert(2 * kSlotKeys == 32);
  constexpr int kPitch = RowOperands<Layout>::kPitch, kBatch = 4;
  const uint32_t slots = fixed_shared_address(shared.slots), full = fixed_shared_address(shared.full),
                 empty = fixed_shared_address(shared.empty);
  const int32_t* list = args.topk_rows.row(place.row);
  const int own = lane / kSlotKeys * Producers * kSlotKeys + lane % kSlotKeys;
  const auto id_in = [&](const Work& work, int nth) {
    const int key = nth * kSlotKeys + own;
    return key < work.keys ? list[work.first + key] : -1;
  };
  const bool elected = elect_one();
  const Work most = work_of(args, place, int(args.topk_rows.extent(1)));
  int32_t next = id_in(most, producer);
  const Work work = work_of(args, place, valid);
  if (work.first != most.first || work.keys != most.keys) next = id_in(work, producer);
  for (int first = producer; first < kTileSlots * work.tiles; first += 2 * Producers) {
    const auto from =
        reinterpret_cast<uint64_t>(next >= 0 ? args.cache + int64_t(next) * Layout::kRowBytes : kNoKey[lane]);
    next = id_in(work, first + 2 * Producers);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int nth = first + half * Producers;
      if (nth >= kTileSlots * work.tiles) break;
      const int slot = nth % S::kSlots, use = nth / S::kSlots;
      const uint32_t to = slots + slot * S::kSlotBytes;
      const Barrier arrived{full + 8 * slot};
      if (use > 0) Barrier{empty + 8 * slot}.wait(uint32_t(use - 1) & 1);
      if (elected) arrived.expect(kSlotKeys * Layout::kRowBytes);
#pragma unroll
      for (int i = 0; i < kSlotKeys; i += kBatch) {
        uint64_t row[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) row[j] = __shfl_sync(0xFFFFFFFFu, from, kSlotKeys * half + i + j);
        if (elected) {
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            bulk_copy_once(to + (i + j) * kPitch, reinterpret_cast<const void*>(row[j]), Layout::kRowBytes, arrived);
          }
        }
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
  // Every slot has one helper: a barrier tells by parity alone whether rows are there, so that whoever had not waited
  // for those before could take rows for arrived that are not.
  for (int nth = 0; nth < kTileSlots * work.tiles; ++nth) {
    const int slot = nth % S::kSlots;
    if (slot % kHelpers != helper) continue;
    Barrier{full + 8 * slot}.wait(uint32_t(nth / S::kSlots) & 1);
    if (lane < kSlotKeys)
      RowOperands<Layout>::make_table(slots + slot * S::kSlotBytes, tables + slot * S::kTableBytes, lane);
    Barrier{ready + 8 * slot}.arrive();
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
  const HalfUnit half(__reduce_max_sync(0xFFFFFFFFu, largest));
  uint32_t pairs[8];
  scale_query(words, half.factor, pairs);
  if (lane == 0) shared.query_unit[column] = half.unit;
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

/// A warp takes every sixteenth head, and asks for all of its bytes before it waits for the first.
template <class Layout, int Columns>
__device__ __forceinline__ void load_query(Shared<Layout, Columns>& shared, const ManyHeadsArgs& args,
                                           const Place& place, int warp, int lane) {
  constexpr bool kPlain = RowOperands<Layout>::kPlainPe;
  constexpr int kHeads = (Columns + kMathWarps - 1) / kMathWarps, kWords = kPlain ? 2 : 1;
  uint4 latent[kHeads][kWords], pe[kHeads][kWords];
  const auto* first = reinterpret_cast<const uint4*>(args.query.at(place.row, place.head));
  constexpr int kHeadWords = kQueryRow * (kPlain ? 2 : 1) / 16, kPeWords = kLatent * (kPlain ? 2 : 1) / 16;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int column = warp + i * kMathWarps;
    const bool real = column < place.heads;
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
    if (column >= Columns) break;
    if constexpr (kPlain) {
      store_plain_query(shared, latent[i], pe[i], column, lane);
    } else {
      store_e4m3_query(shared, latent[i][0], column, lane);
      if (lane < kPe / 16) store_e4m3_query(shared, pe[i][0], column, kLatent / 16 + lane);
    }
  }
}

}  // namespace dsacore::cuda::many
