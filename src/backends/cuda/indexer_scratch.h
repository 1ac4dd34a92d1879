// Scratch of the indexer: the histograms and the counts of pages, which are zero between runs, and the ordered keys of
// all scores. The former lie first and have one size, so that shapes that share a scratch agree on them.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cuda/scores_plan.h"
#include "dsacore/problem.h"
#include "plan/registry.h"

namespace dsacore::cuda {

struct IndexerScratch {
  uint32_t* histograms;  ///< [kMaxRows, kScoreBins]
  uint32_t* scored;      ///< [kMaxRows]: pages of the row that have been scored
  uint32_t* keys;        ///< [rows, key_pitch]: of the tokens that a row sees, where it sees more than topk
  int64_t key_pitch;     ///< elements, a multiple of 64
  int64_t piece_bytes = kPieceBytes;

  /// Keys of a piece of the scores: few enough to stay in L2 until they have been selected from, beside those of the
  /// next piece.
  static constexpr int64_t kPieceBytes = 8 << 20;
  static constexpr int64_t kHistogramBytes = int64_t(kMaxRows) * kScoreBins * int64_t(sizeof(uint32_t));
  static constexpr int64_t kKeysAt = kHistogramBytes + int64_t(kMaxRows) * int64_t(sizeof(uint32_t));
  static_assert(kKeysAt % 128 == 0, "no line of L2 has keys of two rows: the selection gives up whole ones");

  static int64_t bytes(const ShapeKey& shape) {
    return kKeysAt + shape.rows * (shape.max_context + kIndexPage) * int64_t(sizeof(uint32_t));
  }
  /// Spreads `rows` rows over what there is, which is at least what `bytes` asked for.
  IndexerScratch(std::span<std::byte> scratch, int64_t rows)
      : histograms(reinterpret_cast<uint32_t*>(scratch.data())),
        scored(reinterpret_cast<uint32_t*>(scratch.data() + kHistogramBytes)),
        keys(reinterpret_cast<uint32_t*>(scratch.data() + kKeysAt)),
        key_pitch((int64_t(scratch.size()) - kKeysAt) / int64_t(sizeof(uint32_t)) / rows / kIndexPage * kIndexPage) {}
};

/// Tokens that a row can see at most: what its block table and its place for keys hold. Lengths are cut there, so that
/// a wrong one cannot make a kernel leave its memory.
inline int context_of(const IndexerArgs& args, const IndexerScratch& scratch) {
  const int64_t held = args.block_table.extent(1) * args.page;
  const int64_t kept = scratch.key_pitch < held ? scratch.key_pitch : held;
  return int(kept < kMaxContext ? kept : kMaxContext);
}

/// Whether there are scores in pieces: where memory bounds them. (64 x 131072 of `mxfp4` keys takes 248 us in pieces,
/// 243 at once, 16 requests of four rows 145 and 124.)
inline bool has_pieces(IndexFormat format, int index_heads, int q) {
  return format == IndexFormat::kFp8 && score_passes(index_heads) == 1 && q == 1;
}

/// Whether a step's scores are made in pieces, so that the selection of a row begins when that row is scored, and gives
/// its keys up: if those of the largest context are more than one and a half pieces.
inline bool in_pieces(const IndexerArgs& args, const IndexerScratch& scratch) {
  const int64_t keys = args.index_query.extent(0) * context_of(args, scratch);
  return has_pieces(args.index.format, args.model->sizes.index_heads, args.q) &&
         2 * keys * int64_t(sizeof(uint32_t)) > 3 * scratch.piece_bytes;
}

}  // namespace dsacore::cuda
