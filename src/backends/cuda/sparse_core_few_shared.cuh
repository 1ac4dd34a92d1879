// Sparse core for few heads: the cache formats as the kernel sees them, and its shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/launch.h"
#include "backends/cuda/sparse_core_few.h"
#include "format/layouts.h"

namespace dsacore::cuda {

inline constexpr int kMathWarps = 8;
inline constexpr int kProducerWarps = 4;  // one warpgroup, for registers are moved between warpgroups
inline constexpr int kFewHeadsThreads = 32 * (kMathWarps + kProducerWarps);
inline constexpr int kStages = 2;      ///< tiles in the ring, at most
inline constexpr int kValueTiles = 2;  ///< of widened values: the next may be written while one is read

/// Rows lie in the ring at `kPitch`, operands are read at `kOperandPitch`: an odd multiple of 16 bytes modulo 128, so
/// that ldmatrix meets no bank twice. Heads of the query lie at `kQueryPitch`, for the same reason.
template <KvFormat Format>
struct FewHeadsFormat;

template <>
struct FewHeadsFormat<KvFormat::kFp8DsMla> {
  static constexpr int kRowBytes = KvFp8DsMla::kRowBytes;
  static constexpr int kPitch = kRowBytes, kOperandPitch = kPitch;
  static constexpr int kPeAt = KvFp8DsMla::kPeAt;
  static constexpr int kScaleGroups = KvFp8DsMla::kTiles;  ///< of p: one scale a key and 128 latents
  static constexpr bool kWidened = false;                  ///< operands are the raw rows
  static constexpr bool kPlainPe = true;                   ///< pe and the query are BF16
  static constexpr int kQueryBytes = kQueryRow * 2, kQueryPitch = kQueryBytes + 32;
};
template <>
struct FewHeadsFormat<KvFormat::kFp8> {
  static constexpr int kRowBytes = KvFp8::kRowBytes;
  static constexpr int kPitch = kRowBytes + 16, kOperandPitch = kPitch;
  static constexpr int kPeAt = KvFp8::kPeAt;
  static constexpr int kScaleGroups = 1;
  static constexpr bool kWidened = false;
  static constexpr bool kPlainPe = false;
  static constexpr int kQueryBytes = kQueryRow, kQueryPitch = kQueryBytes + 16;
};
/// The logits read rows 8 bytes a lane, and leave values as FP16 at `kValuePitch`, which meets no bank twice either.
template <>
struct FewHeadsFormat<KvFormat::kNvfp4DsMla> {
  static constexpr int kRowBytes = KvNvfp4DsMla::kRowBytes;
  static constexpr int kPitch = kRowBytes;
  static constexpr int kValuePitch = kLatent * 2 + 16;
  static constexpr int kPeAt = KvNvfp4DsMla::kPeAt;
  static constexpr int kScaleGroups = 1;
  static constexpr bool kWidened = true;
  static constexpr bool kPlainPe = false;
  static constexpr int kQueryBytes = kQueryRow, kQueryPitch = kQueryBytes + 16;
};

/// Bytes of a tile of rows.
template <KvFormat Format, int Keys>
constexpr int kTileBytes = Keys * FewHeadsFormat<Format>::kPitch;
/// Of a tile of widened values.
template <KvFormat Format, int Keys>
constexpr int kValueTileBytes = 0;
template <int Keys>
constexpr int kValueTileBytes<KvFormat::kNvfp4DsMla, Keys> = Keys * FewHeadsFormat<KvFormat::kNvfp4DsMla>::kValuePitch;

/// What a CTA keeps beside its tiles. In shared memory follow the ring and the tiles of widened values.
template <KvFormat Format, int Keys, int Sixteens>
struct FewHeadsShared {
  static constexpr int kHeads = 16 * Sixteens;
  static constexpr int kScaleGroups = FewHeadsFormat<Format>::kScaleGroups;

  union {
    alignas(128) std::byte query[kHeads * FewHeadsFormat<Format>::kQueryPitch];  ///< until it is in registers
    float logits[kKeyGroups][kHeads][Keys + 8];  ///< each group's part of the dot products
  };
  alignas(16) uint16_t p[kScaleGroups][kHeads][Keys + 8];  ///< FP16: times the key's scale, in the head's unit
  alignas(16) float rescale[kHeads][kScaleGroups];         ///< of the latents summed so far
  alignas(16) float scales[kScaleGroups][Keys];            ///< of the tile's keys, where p is multiplied by them
  alignas(8) uint64_t full[kStages], empty[kStages], query_arrived;
};

}  // namespace dsacore::cuda
