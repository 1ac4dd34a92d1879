// Sparse core for few heads: how the keys of a row are cut over CTAs, and what the host hands to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stages/stages.h"

namespace dsacore::cuda {

inline constexpr int kFewHeadsMax = 16;  ///< the 16 rows of an mma.sync operand
inline constexpr int kMaxGroups = 4;     ///< clusters of a row

/// Splits of a row's list of keys. Fixed by (rows, topk) alone: the bits of a row depend on nothing else of the batch.
///
/// A row has `groups` clusters of `cluster` CTAs; CTA `s = group * cluster + rank` takes the keys at places
/// `s * tiles * tile_keys` and on. The CTAs of a cluster merge through each other's shared memory, each 512 / cluster
/// latents of all heads; the clusters of a row merge through memory, the last to arrive adds up.
struct FewHeadsPlan {
  int tile_keys;  ///< keys of a tile: 32 or 64
  int tiles;      ///< tiles of a CTA, at most
  int cluster;    ///< 1, 2, 4, 8, 16
  int groups;     ///< clusters of a row

  DSACORE_HD constexpr int split_keys() const { return tiles * tile_keys; }
};

constexpr FewHeadsPlan few_heads_plan(int rows, int topk) {
  // Up to 264 CTAs, two on each of 132 SMs; clusters of 4 and more leave SMs of a GPC idle when they fill the chip, and
  // so stop at 132. Few rows: as many CTAs as still shorten the gather.
  int cluster = rows <= 8 ? 16 : rows <= 16 ? 8 : rows <= 132 ? 2 : 1;
  int groups = rows <= 2 ? 4 : rows <= 4 ? 2 : rows <= 16 ? 1 : rows <= 33 ? 4 : rows <= 66 ? 2 : 1;
  const int tile_keys = rows <= 2 ? 32 : 64;
  const int tiles = (topk + tile_keys - 1) / tile_keys;
  while (groups > 1 && groups / 2 * cluster >= tiles) groups /= 2;
  while (cluster > 1 && cluster / 2 * groups >= tiles) cluster /= 2;
  const int splits = cluster * groups;
  return {tile_keys, (tiles + splits - 1) / splits, cluster, groups};
}

/// The kernel's parameter.
struct FewHeadsArgs {
  QueryRows query;
  View<const int32_t, 2> topk_rows;
  View<const int32_t, 1> valid;
  const std::byte* cache;
  View<BFloat16, 3> latent;
  View<float, 2> lse;
  uint32_t* arrivals;  ///< [rows, cluster] of clusters that have left their part; zero between runs
  float* parts;        ///< [rows, groups, cluster] of `part_floats`
  float scale;         ///< of logits
  float k_scale;       ///< of the latent
  FewHeadsPlan plan;
  int cluster_bits, group_bits;  ///< log2 of the plan's
  int slice_bits;                ///< log2 of 512 / cluster
  int stages;                    ///< tiles in the ring
  int received_at;  ///< where in shared memory the neighbours' parts arrive; 0: over tiles that have been read
};

/// Floats of one cluster's part of a slice of a row: latents [heads, slice], then {largest logit, sum} [heads].
DSACORE_HD constexpr int64_t part_floats(int heads, int cluster) {
  return int64_t(heads) * (kLatent / cluster) + (2 * heads + 3) / 4 * 4;
}

}  // namespace dsacore::cuda
