// Sparse core for few heads: how the keys of a row are cut over CTAs, and what these leave for the merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stages/stages.h"

namespace dsacore::cuda {

inline constexpr int kFewHeadsMax = 16;  ///< the 16 rows of an mma.sync operand
inline constexpr int kMaxSplits = 64;    ///< of a row's keys
inline constexpr int kKeyGroups = 4;     ///< latents of a key are multiplied, and scaled, in four groups of 128
inline constexpr int kGroupLatents = kLatent / kKeyGroups;
inline constexpr float kLog2E = 1.44269504088896340736f;

/// Splits of a row's list of keys. Fixed by (rows, topk) alone: the bits of a row depend on nothing else of the batch.
/// CTA `row * splits + s` takes the keys at places `s * tiles * tile_keys` and on.
struct FewHeadsPlan {
  int tile_keys;  ///< keys of a tile: 32 or 64
  int tiles;      ///< tiles of a CTA, at most
  int splits;     ///< a power of two
  bool alone;     ///< one CTA an SM, not two

  DSACORE_HD constexpr int split_keys() const { return tiles * tile_keys; }
};

constexpr FewHeadsPlan few_heads_plan(int rows, int topk) {
  // Up to 264 CTAs, two on each of 132 SMs. Few rows: as many CTAs as still shorten the gather, and fit the SMs alone.
  int splits = rows <= 2 ? 64 : rows <= 4 ? 32 : rows <= 8 ? 16 : rows <= 33 ? 8 : rows <= 66 ? 4 : rows <= 132 ? 2 : 1;
  const int tile_keys = rows <= 2 ? 32 : 64;
  const int tiles = (topk + tile_keys - 1) / tile_keys;
  while (splits > 1 && splits / 2 >= tiles) splits /= 2;
  return {tile_keys, (tiles + splits - 1) / splits, splits, rows <= 16};
}

/// Of one head, one split and one group of latents. Latents of the part are in units of `unit`.
struct alignas(16) PartStatistics {
  float largest;  ///< logit before its scale
  float sum;      ///< of exp(scale * (logit - largest))
  float unit;
  float unused;
};
static_assert(sizeof(PartStatistics) == 16);  // written as one float4

/// What the CTAs of a row leave in memory; those without keys leave nothing.
struct Parts {
  float* latents;              ///< [rows, splits, heads, 512]
  PartStatistics* statistics;  ///< [rows, heads, 4, splits]

  static DSACORE_HD constexpr int64_t bytes(int64_t rows, int splits, int heads) {
    return rows * splits * heads * int64_t(kLatent * sizeof(float) + kKeyGroups * sizeof(PartStatistics));
  }
  static Parts in(std::byte* scratch, int64_t rows, int splits, int heads) {
    auto* latents = reinterpret_cast<float*>(scratch);
    return {latents, reinterpret_cast<PartStatistics*>(latents + rows * splits * heads * kLatent)};
  }
};

}  // namespace dsacore::cuda
