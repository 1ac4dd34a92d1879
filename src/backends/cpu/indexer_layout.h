// How the indexer of the cpu backend divides a step and its scratch.
//
// scores:  task (request, kTaskPages pages) -> keys [q, tokens] and the largest key of every kKeyGroup tokens
// select:  task (row): keys, maxima -> token ids
//
// A token's key depends on nothing but its bytes, and a row's selection on nothing but its keys: any division gives the same bits.
// Scratch holds one buffer set a worker and the keys of a wave of requests, as many as fit into kWaveKeys (but at least one).
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/rows.h"
#include "dsacore/problem.h"

namespace dsacore::cpu {

inline constexpr int kUnitTokens = 32;  ///< decoded and multiplied at a time: half an index page, so that all of it stays in L1
inline constexpr int kUnitsOfPage = kIndexPage / kUnitTokens;
inline constexpr int kKeyGroup = 16;    ///< tokens that share a maximum
inline constexpr int kTaskPages = 16;
inline constexpr int kColumnStep = 16;  ///< heads are padded to a multiple of it: block_dot's columns
inline constexpr int64_t kWaveKeys = int64_t(8) << 20;

/// The keys of one request, and which tasks compute them.
struct RequestKeys {
  int64_t request;
  int64_t tokens;     ///< that this rank holds of the last row's n; 0: no row sees more than topk
  int64_t pitch;      ///< tokens, rounded up to pages
  int64_t task_end;   ///< tasks of this request and of those before it in the wave
  uint32_t* keys;     ///< [q, pitch] format/score_key.h; 0 from the row's own n on
  uint32_t* maxima;   ///< [q, pitch / kKeyGroup]

  uint32_t* keys_of(int position) const { return keys + position * pitch; }
  uint32_t* maxima_of(int position) const { return maxima + position * (pitch / kKeyGroup); }
};

constexpr int64_t key_pitch(int64_t tokens) { return (tokens + kIndexPage - 1) / kIndexPage * kIndexPage; }

/// How the index queries of a request lie side by side as block_dot's columns: whole rows, padded to kColumnStep, in panels of at
/// least 32 columns where q allows it (both sums of a pair of AMX tiles).
struct QueryPanels {
  QueryPanels(int index_heads, int positions)
      : heads(index_heads),
        columns((index_heads + kColumnStep - 1) / kColumnStep * kColumnStep),
        q(positions),
        rows(std::min(positions, std::max(1, 2 * kColumnStep / columns))) {}

  int heads;
  int columns;  ///< of one row
  int q;
  int rows;     ///< of a panel; the last panel may have fewer

  int columns_from(int position) const { return std::min(rows, q - position) * columns; }
  /// Element at which the panel that begins with row `position` begins.
  int64_t panel_at(int position) const { return int64_t(position) * columns * kIndexDim; }
};

/// What a worker needs to score.
struct ScoreBuffers {
  int64_t* request;   ///< whose queries and weights these are; -1: none
  BFloat16* queries;  ///< panels of [64 pairs][columns][2]
  float* weights;     ///< [q, columns], 0 where padded
  BFloat16* keys[2];  ///< [kUnitTokens, 128]
  float* dots;        ///< [kUnitTokens, columns of a panel]
};

/// What a worker needs to select. The sizes follow from spec 5: see select-inl.h.
struct SelectBuffers {
  uint32_t* keys;       ///< [select_capacity]
  int32_t* tokens;      ///< [select_capacity]
  uint32_t* rest;       ///< [select_rest]
  uint32_t* histogram;  ///< [kHistogramWords]
};

inline constexpr int kHistogramBits = 11;
inline constexpr int kHistogramWords = 2 << kHistogramBits;
inline constexpr int kSelectSlack = 64;  ///< elements that a vector store may write past the last one

/// Keys that can survive the maxima's threshold, see collect() in select-inl.h.
constexpr int64_t select_capacity(int topk) { return int64_t(kKeyGroup + 1) * topk + kSelectSlack; }
constexpr int64_t select_rest(int topk, int64_t tokens) {
  return std::max(select_capacity(topk), key_pitch(tokens) / kKeyGroup + kSelectSlack);
}

inline ScoreBuffers take_score_buffers(ScratchPieces& pieces, const QueryPanels& panels) {
  ScoreBuffers b;
  b.request = pieces.take<int64_t>(1);
  b.queries = pieces.take<BFloat16>(panels.panel_at(panels.q));
  b.weights = pieces.take<float>(int64_t(panels.q) * panels.columns);
  for (BFloat16*& keys : b.keys) keys = pieces.take<BFloat16>(kUnitTokens * kIndexDim);
  b.dots = pieces.take<float>(int64_t(kUnitTokens) * panels.columns_from(0));
  return b;
}

inline SelectBuffers take_select_buffers(ScratchPieces& pieces, int topk, int64_t tokens) {
  SelectBuffers b;
  b.keys = pieces.take<uint32_t>(select_capacity(topk));
  b.tokens = pieces.take<int32_t>(select_capacity(topk));
  b.rest = pieces.take<uint32_t>(select_rest(topk, tokens));
  b.histogram = pieces.take<uint32_t>(kHistogramWords);
  return b;
}

/// The scratch of a step before its keys: a list of requests, then the workers' buffers, of which those for scoring and those for
/// selecting share their bytes.
class IndexerScratch {
 public:
  /// `tokens`: the longest request's on this rank. From null it only counts.
  IndexerScratch(std::byte* base, const QueryPanels& panels, int topk, int64_t tokens, int64_t most_requests)
      : base_(base), panels_(panels), topk_(topk), tokens_(tokens) {
    ScratchPieces pieces(base);
    requests = pieces.take<RequestKeys>(most_requests);
    workers_at_ = pieces.bytes();
    ScratchPieces score(nullptr), select(nullptr);
    take_score_buffers(score, panels);
    take_select_buffers(select, topk, tokens);
    worker_bytes_ = std::max(score.bytes(), select.bytes());
  }

  ScoreBuffers score_buffers(int worker) const {
    ScratchPieces pieces(at(worker));
    return take_score_buffers(pieces, panels_);
  }
  SelectBuffers select_buffers(int worker) const {
    ScratchPieces pieces(at(worker));
    return take_select_buffers(pieces, topk_, tokens_);
  }
  /// Where the keys begin.
  int64_t keys_at(int threads) const { return workers_at_ + threads * worker_bytes_; }

  RequestKeys* requests;

 private:
  std::byte* at(int worker) const { return base_ + workers_at_ + worker * worker_bytes_; }

  std::byte* base_;
  QueryPanels panels_;
  int topk_;
  int64_t tokens_;
  int64_t workers_at_;
  int64_t worker_bytes_;
};

/// Bytes of the keys and maxima of `q` rows of `tokens` tokens.
constexpr int64_t key_bytes(int q, int64_t tokens) {
  const int64_t keys = q * key_pitch(tokens);
  return (keys + keys / kKeyGroup) * int64_t(sizeof(uint32_t));
}

}  // namespace dsacore::cpu
