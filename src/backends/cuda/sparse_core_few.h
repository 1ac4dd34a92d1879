// Sparse core for few heads: how the keys of a row are cut over CTAs, and what these leave for the merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stages/stages.h"

namespace dsacore::cuda {

inline constexpr int kMaxSplits = 64;  ///< of a row's keys
inline constexpr int kKeyGroups = 4;   ///< latents of a key are multiplied, and scaled, in four groups of 128
inline constexpr int kGroupLatents = kLatent / kKeyGroups;
inline constexpr float kLog2E = 1.44269504088896340736f;

/// How heads and keys of a row are cut. Fixed by (rows, heads, topk) alone: the bits of a row depend on nothing else of
/// the batch. CTA (g, s, row) takes the heads `g * group_heads` and on, and the keys at places `s * split_keys()` and
/// on.
struct FewHeadsPlan {
  int sixteens;   ///< of heads that a CTA has room for: 1 or 2
  int tile_keys;  ///< keys of a tile: 32 or 64
  int tiles;      ///< tiles of a CTA, at most
  int splits;
  int groups;
  int group_heads;  ///< of each group but the last

  DSACORE_HD constexpr int split_keys() const { return tiles * tile_keys; }
};

FewHeadsPlan few_heads_plan(int rows, int heads, int topk);

/// Of one head and one split.
struct alignas(8) PartSoftmax {
  float reference;  ///< a logit, before its scale
  float sum;        ///< of exp(scale * (logit - reference))
};

/// What the CTAs of a row leave in memory; those without keys leave nothing.
struct Parts {
  float* latents;        ///< [rows, splits, heads, 512]
  PartSoftmax* softmax;  ///< [rows, heads, splits]
  float* units;          ///< [rows, heads, 4, splits]: of each group of the part's latents

  static DSACORE_HD constexpr int64_t bytes(int64_t rows, int splits, int heads) {
    return rows * splits * heads * int64_t(sizeof(PartSoftmax) + (kLatent + kKeyGroups) * sizeof(float));
  }
  static Parts in(std::byte* scratch, int64_t rows, int splits, int heads) {
    auto* latents = reinterpret_cast<float*>(scratch);
    auto* softmax = reinterpret_cast<PartSoftmax*>(latents + rows * splits * heads * kLatent);
    return {latents, softmax, reinterpret_cast<float*>(softmax + rows * splits * heads)};
  }
};

}  // namespace dsacore::cuda
