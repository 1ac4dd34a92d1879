// candidate_merge of the cpu backend: step 2 of spec 7 after the exchange.
//
// candidates [D, rows, topk], each list ascending by token -> threshold of all keys (select-inl.h) -> what each list
// keeps -> one list, ascending by token -> topk_tokens; the owned ones -> physical rows
#include <algorithm>
#include <climits>

#include "backends/cpu/indexer_layout.h"
#include "backends/cpu/kernels.h"
#include "stages/stages.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/candidate_merge.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/select-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Scratch of one worker. A kept token is held with what decides among equal keys: bit 0 is set where its key equals
/// the threshold.
struct MergeBuffers {
  uint32_t* keys;       ///< [D * topk]
  uint32_t* rest;       ///< [D * topk]
  uint32_t* histogram;  ///< [kHistogramWords]
  int64_t* kept;        ///< [D * topk] token * 2 + tie
  int64_t* merged;      ///< [D * topk]
};

MergeBuffers take_buffers(ScratchPieces& pieces, int ranks, int topk) {
  const int64_t count = int64_t(ranks) * topk + kSelectSlack;
  MergeBuffers b;
  b.keys = pieces.take<uint32_t>(count);
  b.rest = pieces.take<uint32_t>(count);
  b.histogram = pieces.take<uint32_t>(kHistogramWords);
  b.kept = pieces.take<int64_t>(count);
  b.merged = pieces.take<int64_t>(count);
  return b;
}

int64_t worker_bytes(int ranks, int topk) {
  ScratchPieces pieces(nullptr);
  take_buffers(pieces, ranks, topk);
  return pieces.bytes();
}

/// Keeps of every rank's list the keys above the threshold and the first `ties` of those equal to it. `ends[d]` is
/// where list `d` ends in `kept`.
void keep_lists(const CandidateMergeArgs& args, int64_t row, int topk, const Threshold& threshold, int64_t ties,
                int64_t* kept, int64_t* ends) {
  int64_t count = 0;
  for (int64_t d = 0; d < args.candidates.extent(0); ++d) {
    const Candidate* list = args.candidates.row(d, row);
    int64_t equal = 0;
    for (int i = 0; i < topk; ++i) {  // written always, counted where kept: no branch to guess
      const bool tie = list[i].key == threshold.key && equal < ties;
      kept[count] = int64_t(list[i].token) * 2 + tie;
      equal += tie;
      count += tie || list[i].key > threshold.key;
    }
    ends[d] = count;
  }
}

/// Merges neighbouring lists until there is one; returns where it is. Lists are ascending, and so is the result.
const int64_t* merge_lists(int64_t lists, int64_t* ends, int64_t* kept, int64_t* merged) {
  while (lists > 1) {
    int64_t begin = 0, out = 0;
    for (int64_t i = 0; i < lists; i += 2, ++out) {
      const int64_t middle = ends[i], end = ends[std::min(i + 1, lists - 1)];
      std::merge(kept + begin, kept + middle, kept + middle, kept + end, merged + begin);
      ends[out] = begin = end;
    }
    lists = out;
    std::swap(kept, merged);
  }
  return kept;
}

/// Writes the selected tokens by `token_at(i)`, ascending, then the physical rows of those that this rank owns.
template <class TokenAt>
void write_row(const CandidateMergeArgs& args, int64_t row, int64_t valid, TokenAt token_at) {
  const int topk = args.model->config.topk;
  const int32_t* table = args.block_table.row(row / args.q);
  int32_t* tokens = args.topk_tokens.row(row);
  int32_t* rows = args.local_rows.row(row);
  int64_t local = 0;
  for (int64_t i = 0; i < valid; ++i) {
    const TokenId token(token_at(i));
    tokens[i] = token.value();
    if (!owns(args.shard, token)) continue;
    rows[local++] = physical_row(kv_place(table, args.page, local_of(args.shard, token)), args.stride_rows).value();
  }
  std::fill(tokens + valid, tokens + topk, -1);
  std::fill(rows + local, rows + topk, -1);
  args.valid(row) = int32_t(valid);
  args.local_valid(row) = int32_t(local);
}

void merge_row(const CandidateMergeArgs& args, int64_t row, const MergeBuffers& b) {
  const int topk = args.model->config.topk;
  const int64_t ranks = args.candidates.extent(0);
  const int64_t n = keys_seen(args.seq_lens(row / args.q), args.q, int(row % args.q));
  if (n <= topk) return write_row(args, row, n, [](int64_t i) { return int32_t(i); });

  for (int64_t d = 0; d < ranks; ++d) {
    const Candidate* list = args.candidates.row(d, row);
    for (int i = 0; i < topk; ++i) b.keys[d * topk + i] = list[i].key;
  }
  const Threshold threshold = kth_largest(b.keys, ranks * topk, topk, b.rest, b.histogram);
  int64_t ties = topk - threshold.greater;
  int64_t ends[kMaxRanks];
  keep_lists(args, row, topk, threshold, ties, b.kept, ends);
  int64_t* merged = b.merged;
  const int64_t* all = merge_lists(ranks, ends, b.kept, merged);
  const int64_t count = ends[0];
  // Of all lists' ties the first ones stay.
  int32_t* selected = reinterpret_cast<int32_t*>(b.keys);
  int64_t valid = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool tie = (all[i] & 1) != 0;
    selected[valid] = int32_t(all[i] >> 1);
    valid += !tie || ties > 0;
    ties -= tie;
  }
  write_row(args, row, valid, [&](int64_t i) { return selected[i]; });
}

void run_candidate_merge(const CandidateMergeArgs& args, const Workspace& workspace) {
  const int ranks = int(args.candidates.extent(0)), topk = args.model->config.topk;
  const int64_t bytes = worker_bytes(ranks, topk);
  workspace.threads->for_each(args.topk_tokens.extent(0), [&](int64_t row, int worker) {
    ScratchPieces pieces(workspace.scratch.data() + worker * bytes);
    merge_row(args, row, take_buffers(pieces, ranks, topk));
  });
}

Verdict accepts(const ShapeKey& shape) {
  if (shape.ranks <= kMaxRanks) return {};
  return {false, "ranks: allowed 1..8"};
}

int64_t scratch_bytes(const ShapeKey& shape, int threads) { return threads * worker_bytes(shape.ranks, shape.topk); }

constexpr Kernel<CandidateMergeArgs> kKernels[] = {{"threshold", accepts, scratch_bytes, run_candidate_merge}};

}  // namespace

std::span<const Kernel<CandidateMergeArgs>> CandidateMergeKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(CandidateMergeKernels);
std::span<const Kernel<CandidateMergeArgs>> candidate_merge_kernels() {
  return HWY_DYNAMIC_DISPATCH(CandidateMergeKernels)();
}

}  // namespace dsacore::cpu
#endif
