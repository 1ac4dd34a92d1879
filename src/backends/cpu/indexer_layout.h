// How the indexer of the cpu backend divides a step and its scratch.
//
// scores:  task (request, 16 to 128 pages) -> keys [q, tokens] and the largest key of every kKeyGroup tokens
// select:  task (row): keys, maxima -> token ids
//
// A token's key depends on nothing but its bytes, and a row's selection on nothing but its keys: any division gives the
// same bits. Scratch holds one buffer set a worker and the keys of a wave of requests, as many as fit into kWaveKeys
// (but at least one).
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/rows.h"
#include "dsacore/problem.h"

namespace dsacore::cpu {

// A unit is what is decoded and multiplied at a time: half an index page, so that all of it stays in L1.
inline constexpr int kUnitTokens = 32;
inline constexpr int kUnitsOfPage = kIndexPage / kUnitTokens;
// How far ahead a unit's bytes are asked for, and before that a line of each of its pages of memory, for their
// addresses.
inline constexpr int kUnitsAhead = 4;
inline constexpr int kTouchAhead = 12;
// The longer a task, the less its start counts; but threads are to be equally busy.
inline constexpr int kMinTaskPages = 16, kMaxTaskPages = 128;
inline constexpr int kWaveTasks = 32;

inline constexpr int kKeyGroup = 16;     ///< tokens that share a maximum
inline constexpr int kColumnStep = 16;   ///< heads are padded to a multiple of it: block_dot's columns
inline constexpr int kTileColumns = 32;  ///< of two AMX tiles
inline constexpr int64_t kWaveKeys = int64_t(8) << 20;

/// The keys of one request, and which tasks compute them.
struct RequestKeys {
  int64_t request;
  int64_t tokens;    ///< that this rank holds of the last row's n; 0: no row sees more than topk
  int64_t pitch;     ///< tokens, rounded up to pages
  int64_t task_end;  ///< tasks of this request and of those before it in the wave
  uint32_t* keys;    ///< [q, pitch] format/score_key.h; 0 from the row's own n on
  uint32_t* maxima;  ///< [q, pitch / kKeyGroup]

  uint32_t* keys_of(int position) const { return keys + position * pitch; }
  uint32_t* maxima_of(int position) const { return maxima + position * (pitch / kKeyGroup); }
};

/// Pages of a task where a wave has `pages` to be scored.
constexpr int64_t task_pages(int64_t pages) {
  return std::clamp<int64_t>((pages + kWaveTasks - 1) / kWaveTasks, kMinTaskPages, kMaxTaskPages);
}

constexpr int64_t key_pitch(int64_t tokens) { return (tokens + kIndexPage - 1) / kIndexPage * kIndexPage; }

/// How the index queries of a request lie side by side as columns: row after row, each padded, in panels of `width`
/// columns, of which the last may be narrower. A panel is [64 pairs of k][columns][2].
struct QueryPanels {
  int heads;
  int q;
  int columns;  ///< of a row
  int width;    ///< of a panel

  int total() const { return q * columns; }
  int width_from(int column) const { return std::min(width, total() - column); }
  /// Element at which the panel that begins with column `column` begins.
  static int64_t panel_at(int64_t column) { return column * kIndexDim; }
};

/// For block_dot: whole rows, more than one in a panel where they are short.
constexpr QueryPanels block_panels(int heads, int q) {
  const int columns = (heads + kColumnStep - 1) / kColumnStep * kColumnStep;
  return {heads, q, columns, columns * std::max(1, kTileColumns / columns)};
}
/// For scores_amx-inl.h: kTileColumns at a time.
constexpr QueryPanels tile_panels(int heads, int q) {
  return {heads, q, (heads + kTileColumns - 1) / kTileColumns * kTileColumns, kTileColumns};
}

/// What a worker needs to score.
struct ScoreBuffers {
  int64_t* request;   ///< whose queries and weights these are; -1: none
  BFloat16* queries;  ///< panels
  float* weights;     ///< [q, columns], 0 where padded
  BFloat16* keys[2];  ///< [kUnitTokens, 128]
  float* dots[2];     ///< [kUnitTokens, columns of a panel or of a row]
};

/// What the selection of a row needs: a worker's, or that of a row on which all threads work together.
struct SelectBuffers {
  uint32_t* keys;       ///< candidates
  int32_t* tokens;      ///< theirs
  uint32_t* rest;       ///< of kth_largest: as long as keys, and as the maxima
  uint32_t* histogram;  ///< [kHistogramWords]
};

inline constexpr int kHistogramBits = 11;
inline constexpr int kHistogramWords = 2 << kHistogramBits;
inline constexpr int kSelectSlack = 64;  ///< elements that a vector store may write past the last one

inline constexpr int kWordGroups = 64;  ///< groups whose ties are counted together

/// Keys that collect() of select-inl.h can find: above the floor, equal to it, and as many equal ones as it may not yet
/// have counted.
constexpr int64_t select_capacity(int topk) {
  return int64_t(kKeyGroup + 1) * topk + kWordGroups * kKeyGroup + kSelectSlack;
}
constexpr int64_t groups_of(int64_t tokens) { return (tokens + kKeyGroup - 1) / kKeyGroup; }

/// A row on which threads work together is collected in parts.
inline constexpr int kSelectParts = 8;
constexpr int64_t part_groups(int64_t tokens) {
  return (groups_of(tokens) + kSelectParts * kWordGroups - 1) / (kSelectParts * kWordGroups) * kWordGroups;
}
constexpr int64_t part_capacity(int topk, int64_t tokens) {
  return std::min(select_capacity(topk), part_groups(tokens) * kKeyGroup + kSelectSlack);
}

inline ScoreBuffers take_score_buffers(ScratchPieces& pieces, const QueryPanels& panels) {
  ScoreBuffers b;
  b.request = pieces.take<int64_t>(1);
  b.queries = pieces.take<BFloat16>(QueryPanels::panel_at(panels.total()));
  b.weights = pieces.take<float>(panels.total());
  for (BFloat16*& keys : b.keys) keys = pieces.take<BFloat16>(kUnitTokens * kIndexDim);
  for (float*& dots : b.dots) dots = pieces.take<float>(int64_t(kUnitTokens) * std::max(panels.width, panels.columns));
  return b;
}

/// Buffers for `capacity` candidates of a row of up to `tokens`.
inline SelectBuffers take_select_buffers(ScratchPieces& pieces, int64_t capacity, int64_t tokens) {
  SelectBuffers b;
  b.keys = pieces.take<uint32_t>(capacity);
  b.tokens = pieces.take<int32_t>(capacity);
  b.rest = pieces.take<uint32_t>(std::max(capacity, groups_of(tokens) + kSelectSlack));
  b.histogram = pieces.take<uint32_t>(kHistogramWords);
  return b;
}

/// The scratch of a step before its keys: a list of requests, buffers for a row on which threads select together, and
/// the workers' buffers, of which those for scoring and those for selecting share their bytes.
class IndexerScratch {
 public:
  /// `tokens`: the longest request's on this rank. From null it only counts.
  IndexerScratch(std::byte* base, const QueryPanels& panels, int topk, int64_t tokens, int64_t most_requests)
      : base_(base), panels_(panels), topk_(topk), tokens_(tokens) {
    ScratchPieces pieces(base);
    requests = pieces.take<RequestKeys>(most_requests);
    together = take_select_buffers(pieces, kSelectParts * part_capacity(topk, tokens), tokens);
    workers_at_ = pieces.bytes();
    ScratchPieces score(nullptr), select(nullptr);
    take_score_buffers(score, panels);
    take_select_buffers(select, select_capacity(topk), tokens);
    worker_bytes_ = std::max(score.bytes(), select.bytes());
  }

  ScoreBuffers score_buffers(int worker) const {
    ScratchPieces pieces(at(worker));
    return take_score_buffers(pieces, panels_);
  }
  SelectBuffers select_buffers(int worker) const {
    ScratchPieces pieces(at(worker));
    return take_select_buffers(pieces, select_capacity(topk_), tokens_);
  }
  /// Where the keys begin.
  int64_t keys_at(int threads) const { return workers_at_ + threads * worker_bytes_; }

  RequestKeys* requests;
  SelectBuffers together;

 private:
  std::byte* at(int worker) const { return base_ + workers_at_ + worker * worker_bytes_; }

  std::byte* base_;
  QueryPanels panels_;
  int topk_;
  int64_t tokens_;
  int64_t workers_at_;
  int64_t worker_bytes_;
};

/// Bytes of the keys and maxima of `q` rows of `tokens` tokens, a multiple of 64.
constexpr int64_t key_bytes(int q, int64_t tokens) {
  const int64_t keys = q * key_pitch(tokens);
  return (keys + (keys / kKeyGroup + 15) / 16 * 16) * int64_t(sizeof(uint32_t));
}

}  // namespace dsacore::cpu
