// Sparse core for few heads: the cache formats as the kernel sees them, and its shared memory.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>

#include "backends/cuda/sparse_core_few.h"
#include "format/layouts.h"

namespace dsacore::cuda {

inline constexpr int kMathWarps = 8;
inline constexpr int kProducerWarps = 4;  // one warpgroup, for registers are moved between warpgroups
inline constexpr int kFewHeadsThreads = 32 * (kMathWarps + kProducerWarps);
inline constexpr int kKeyGroups = 4;  ///< latents of a key are multiplied in four groups of 128
inline constexpr int kGroupLatents = kLatent / kKeyGroups;
inline constexpr int kSharedLimit = 113 * 1024;  ///< two CTAs on an SM, or one beside a CTA of the next stage

/// Rows lie in the ring at `kPitch`, operands are read at `kOperandPitch`: an odd multiple of 16 bytes modulo 128, so
/// that ldmatrix meets no bank twice.
template <KvFormat Format>
struct FewHeadsFormat;

template <>
struct FewHeadsFormat<KvFormat::kFp8DsMla> {
  static constexpr int kRowBytes = KvFp8DsMla::kRowBytes;
  static constexpr int kPitch = kRowBytes, kOperandPitch = kPitch;
  static constexpr int kPeAt = KvFp8DsMla::kPeAt;
  static constexpr int kScaleGroups = KvFp8DsMla::kTiles;  ///< of p: one scale a key and 128 latents
  static constexpr bool kExpanded = false;                 ///< operands are the raw rows
  static constexpr bool kPlainPe = true;                   ///< pe and the query are BF16
};
template <>
struct FewHeadsFormat<KvFormat::kFp8> {
  static constexpr int kRowBytes = KvFp8::kRowBytes;
  static constexpr int kPitch = kRowBytes + 16, kOperandPitch = kPitch;
  static constexpr int kPeAt = KvFp8::kPeAt;
  static constexpr int kScaleGroups = 1;
  static constexpr bool kExpanded = false;
  static constexpr bool kPlainPe = false;
};
/// Values are widened to e4m3 codes in a tile of their own; block scales are multiplied in FP16, exactly.
template <>
struct FewHeadsFormat<KvFormat::kNvfp4DsMla> {
  static constexpr int kRowBytes = KvNvfp4DsMla::kRowBytes;
  static constexpr int kPitch = kRowBytes, kOperandPitch = kQueryRow + 16;
  static constexpr int kPeAt = kLatent;
  static constexpr int kScaleGroups = 1;
  static constexpr bool kExpanded = true;
  static constexpr bool kPlainPe = false;
};

/// Of one head and one CTA, beside its latents. Latents are in units of `unit` of their group.
struct alignas(16) HeadStatistics {
  float largest;  ///< logit before its scale
  float sum;      ///< of exp(scale * (logit - largest))
  float unused[2];
  float unit[kKeyGroups];
};
static_assert(sizeof(HeadStatistics) == 32);

/// The softmax of a head over several parts.
struct MergedHead {
  float largest;
  float sum;
};

/// An expanded tile: e4m3 operands, and each block's scale in FP16 in two orders.
template <int Keys>
struct ExpandedTile {
  static constexpr int kScalePitch = KvNvfp4DsMla::kBlocks + 8;
  alignas(128) std::byte operands[Keys * FewHeadsFormat<KvFormat::kNvfp4DsMla>::kOperandPitch];
  alignas(16) __half by_key[Keys][kScalePitch];
  alignas(16) __half by_block[KvNvfp4DsMla::kBlocks][Keys + 8];
};

/// What a CTA keeps beside its tiles. In shared memory follow the expanded tile, where the format has one, and the
/// ring.
template <KvFormat Format, int Keys>
struct FewHeadsShared {
  static constexpr int kScaleGroups = FewHeadsFormat<Format>::kScaleGroups;
  static constexpr int kTileBytes = Keys * FewHeadsFormat<Format>::kPitch;

  alignas(128) float logits[kKeyGroups][kFewHeadsMax][Keys + 8];  ///< each group's part of the dot products
  alignas(16) __half p[kScaleGroups][kFewHeadsMax][Keys + 8];     ///< times the key's scale, in the head's unit
  alignas(16) float rescale[kFewHeadsMax][kScaleGroups];          ///< of the latents summed so far
  alignas(16) float scales[kScaleGroups][Keys];                   ///< of the tile's keys, where p is multiplied by them
  alignas(8) uint64_t full[3], empty[3], received;
  uint32_t last;
};

template <KvFormat Format, int Keys>
constexpr int kExpandedAt = int(sizeof(FewHeadsShared<Format, Keys>));
template <KvFormat Format, int Keys>
constexpr int kRingAt =
    kExpandedAt<Format, Keys> + (FewHeadsFormat<Format>::kExpanded ? int(sizeof(ExpandedTile<Keys>)) : 0);

/// Bytes that a cluster's parts take where they arrive.
constexpr int received_bytes(int heads, int cluster) {
  return heads * (kLatent * int(sizeof(float)) + cluster * int(sizeof(HeadStatistics)));
}

}  // namespace dsacore::cuda
