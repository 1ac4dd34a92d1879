// Scratch of the indexer: the histograms, which are zero between runs, and the ordered keys of all scores. The
// histograms lie first and have one size, so that shapes that share a scratch agree on them.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cuda/score_bins.h"
#include "dsacore/problem.h"
#include "plan/registry.h"

namespace dsacore::cuda {

struct IndexerScratch {
  uint32_t* histograms;  ///< [kMaxRows, kScoreBins]
  uint32_t* keys;        ///< [rows, key_pitch]: of the tokens that a row sees, where it sees more than topk
  int64_t key_pitch;     ///< elements, a multiple of 64

  static constexpr int64_t kHistogramBytes = int64_t(kMaxRows) * kScoreBins * int64_t(sizeof(uint32_t));

  static int64_t bytes(const ShapeKey& shape) {
    return kHistogramBytes + shape.rows * (shape.max_context + kIndexPage) * int64_t(sizeof(uint32_t));
  }
  /// Spreads `rows` rows over what there is, which is at least what `bytes` asked for.
  IndexerScratch(std::span<std::byte> scratch, int64_t rows)
      : histograms(reinterpret_cast<uint32_t*>(scratch.data())),
        keys(reinterpret_cast<uint32_t*>(scratch.data() + kHistogramBytes)),
        key_pitch((int64_t(scratch.size()) - kHistogramBytes) / int64_t(sizeof(uint32_t)) / rows / kIndexPage *
                  kIndexPage) {}
};

/// Tokens that a row can see at most: what its block table and its place for keys hold. Lengths are cut there, so that
/// a wrong one cannot make a kernel leave its memory.
inline int context_of(const IndexerArgs& args, const IndexerScratch& scratch) {
  const int64_t held = args.block_table.extent(1) * args.page;
  const int64_t kept = scratch.key_pitch < held ? scratch.key_pitch : held;
  return int(kept < kMaxContext ? kept : kMaxContext);
}

}  // namespace dsacore::cuda
