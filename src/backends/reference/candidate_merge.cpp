// Step 2 of spec 7: all ranks' candidates -> the global selection -> this rank's physical rows.
#include <climits>

#include "backends/reference/kernels.h"
#include "backends/reference/select.h"

namespace dsacore::reference {
namespace {

/// Every rank's candidates of a row, without the padding. Returns how many.
int64_t gather(const CandidateMergeArgs& args, int64_t row, Candidate* out) {
  int64_t count = 0;
  for (int64_t rank = 0; rank < args.candidates.extent(0); ++rank) {
    const Candidate* from = args.candidates.row(rank, row);
    for (int i = 0; i < args.model->config.topk; ++i) {
      if (from[i].token != INT32_MAX) out[count++] = from[i];
    }
  }
  return count;
}

/// The selected tokens that this rank holds, as physical rows, then -1.
void write_local(const CandidateMergeArgs& args, int64_t row) {
  const int32_t* table = args.block_table.row(row / args.q);
  int32_t* rows = args.local_rows.row(row);
  int32_t count = 0;
  for (int32_t i = 0; i < args.valid(row); ++i) {
    const TokenId token(args.topk_tokens(row, i));
    if (!owns(args.shard, token)) continue;
    rows[count++] = physical_row(kv_place(table, args.page, local_of(args.shard, token)), args.stride_rows).value();
  }
  fill_rest(rows, count, args.model->config.topk);
  args.local_valid(row) = count;
}

void run_row(const CandidateMergeArgs& args, int64_t row, Candidate* scratch) {
  const int topk = args.model->config.topk;
  const int64_t n = keys_seen(args.seq_lens(row / args.q), args.q, int(row % args.q));
  int32_t* tokens = args.topk_tokens.row(row);
  int64_t valid = n;
  if (n <= topk) {  // every token is selected
    for (int64_t i = 0; i < n; ++i) tokens[i] = int32_t(i);
  } else {
    const int64_t count = gather(args, row, scratch);
    const auto best = select_best({scratch, size_t(count)}, std::min<int64_t>(topk, count));
    valid = int64_t(best.size());
    for (size_t i = 0; i < best.size(); ++i) tokens[i] = best[i].token;
  }
  fill_rest(tokens, valid, topk);
  args.valid(row) = int32_t(valid);
  write_local(args, row);
}

int64_t row_candidates(int ranks, int topk) { return int64_t(ranks) * topk; }

int64_t scratch_bytes(const ShapeKey& shape, int threads) {
  return threads * row_candidates(shape.ranks, shape.topk) * int64_t(sizeof(Candidate));
}

void run(const CandidateMergeArgs& args, const Workspace& workspace) {
  auto* scratch = reinterpret_cast<Candidate*>(workspace.scratch.data());
  const int64_t each = row_candidates(int(args.candidates.extent(0)), args.model->config.topk);
  workspace.threads->for_each(args.topk_tokens.extent(0),
                              [&](int64_t row, int worker) { run_row(args, row, scratch + worker * each); });
}

constexpr Kernel<CandidateMergeArgs> kKernels[] = {{"reference", accept_all, scratch_bytes, run}};

}  // namespace

std::span<const Kernel<CandidateMergeArgs>> candidate_merge_kernels() { return kKernels; }

}  // namespace dsacore::reference
