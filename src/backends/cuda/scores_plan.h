// What the score kernel is launched with, and how it divides its shared memory.
#pragma once

#include "backends/cuda/score_bins.h"
#include "dsacore/problem.h"
#include "dsacore/view.h"

namespace dsacore::cuda {

struct ScoresParameters {
  View<const int32_t, 1> seq_lens;           ///< [requests]
  View<const int32_t, 2> block_table;        ///< [requests, W]
  View<const int32_t, 2> index_block_table;  ///< [requests, W'] or empty
  int page;                                  ///< P
  const std::byte* cache;
  int64_t cache_pages;
  View<const uint8_t, 3> query;  ///< [rows, heads, 128]
  View<const float, 2> weights;  ///< [rows, heads]
  int requests, q, topk, heads;
  int context;           ///< lengths are cut to it
  uint32_t* keys;        ///< out [rows, key_pitch]
  int64_t key_pitch;     ///< elements
  uint32_t* histograms;  ///< added to [rows, kScoreBins]; null: none is kept
  int stages;            ///< of the ring of pages
  // In pieces (scores_pieces.cuh):
  uint32_t* scored;  ///< added to [rows]: pages of the row that have been scored
  int piece_bits;    ///< a piece has up to 1 << piece_bits units; there are at most kMaxPieces
};

inline constexpr int kMaxPieces = 32;

/// Units that a request has ahead of its pages: what its query and its histogram cost a CTA, in pages. Without them the
/// CTAs that have pages of two requests end last (by 1.4 us of 12 at 8 x 32768).
inline constexpr int kUnitsAhead = 4;

/// Heads of one product: the heads in one part, or in two where they are more than 32 (or, then, 24), padded to a
/// multiple of 8.
constexpr int score_passes(int heads) { return heads > 32 ? 2 : 1; }
constexpr int score_width(int heads) {
  const int part = (heads + score_passes(heads) - 1) / score_passes(heads);
  return (part + 7) / 8 * 8;
}

/// Byte offsets in a CTA's shared memory. The ring is last, so that all others are constants where `q` is one. In
/// pieces the CTA's shares of them lie before it.
struct ScoresShared {
  int histograms, weights, first_unit, lacks, totals, barriers, shares, pages;
  static constexpr int kMaxStages = 16;

  /// The query tiles come first, [q, heads of all passes, 128] with the swizzle of their 1024-byte groups.
  DSACORE_HD constexpr ScoresShared(int q, int tile_heads, bool in_pieces = false)
      : histograms(q * tile_heads * kIndexDim),
        weights(histograms + q * kScoreBins * int(sizeof(uint32_t))),
        first_unit(weights + q * tile_heads * int(sizeof(float))),
        lacks(first_unit + (kMaxRows + 1) * int(sizeof(int))),
        totals(lacks + kMaxRows),
        barriers((totals + kMaxRows / 32 * int(sizeof(int)) + 15) / 16 * 16),
        shares(barriers + 2 * kMaxStages * 8),
        pages((shares + (in_pieces ? kMaxPieces * 8 : 0) + 127) / 128 * 128) {}
};

}  // namespace dsacore::cuda
