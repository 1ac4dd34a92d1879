// Steps 9 and 10 of spec.md: index query and index cache -> scores -> the best topk tokens (or this rank's candidates).
#include <climits>
#include <cmath>

#include "backends/reference/arithmetic.h"
#include "backends/reference/kernels.h"
#include "backends/reference/select.h"
#include "format/layouts.h"
#include "format/score_key.h"

namespace dsacore::reference {
namespace {

constexpr int kTaskTokens = 256;

/// A row's index query, decoded, and its head weights.
struct RowQuery {
  const double* values;  ///< [heads, 128]
  const float* weights;  ///< [heads]
  int heads;
};

int64_t query_values(int heads) { return int64_t(heads) * kIndexDim; }

/// relu(NaN) is NaN.
double relu(double x) { return x > 0 || std::isnan(x) ? x : 0.0; }

/// S_t = kscale_t * sum_h w_h * relu(iq8_h . k8_t). The dot product is exact in FP64.
double score_fp8(const RowQuery& query, const std::byte* page, int token) {
  double key[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) key[i] = kE4m3[uint8_t(page[IndexFp8::value_at(token) + i])];
  double sum = 0;
  for (int h = 0; h < query.heads; ++h) {
    sum += double(query.weights[h]) * relu(dot(query.values + query_values(h), key, kIndexDim));
  }
  return double(IndexFp8::scale(page, token)) * sum;
}

/// S_t = sum_h w_h * relu(sum over the four blocks of blockscale * (iq8_h . k4_t)).
double score_mxfp4(const RowQuery& query, const std::byte* page, int token) {
  constexpr int kBlock = IndexMxfp4::kBlock;
  double key[kIndexDim];
  for (int i = 0; i < kIndexDim; ++i) key[i] = double(IndexMxfp4::value(page, token, i));
  double sum = 0;
  for (int h = 0; h < query.heads; ++h) {
    double product = 0;
    for (int block = 0; block < IndexMxfp4::kBlocks; ++block) {
      const int at = block * kBlock;
      product +=
          double(IndexMxfp4::scale(page, token, block)) * dot(query.values + query_values(h) + at, key + at, kBlock);
    }
    sum += double(query.weights[h]) * relu(product);
  }
  return sum;
}

/// Scores the first `n` tokens that this rank holds of the row's request into `scored`.
void score_tokens(const IndexerArgs& args, int64_t row, const RowQuery& query, int64_t n, Candidate* scored,
                  Threads& threads) {
  const int64_t request = row / args.q;
  const int32_t* table = args.block_table.row(request);
  const int32_t* index_table = args.index_block_table.empty() ? nullptr : args.index_block_table.row(request);
  const int64_t page_bytes = int64_t(kIndexPage) * args.index.row_bytes;
  threads.for_each((n + kTaskTokens - 1) / kTaskTokens, [&](int64_t task, int) {
    const int64_t end = std::min(n, (task + 1) * kTaskTokens);
    for (int64_t t = task * kTaskTokens; t < end; ++t) {
      const LocalId local{int32_t(t)};
      const Place place = index_place(table, index_table, args.page, local);
      const std::byte* page = args.index.data + place.page.value() * page_bytes;
      const double score = args.index.format == IndexFormat::kFp8 ? score_fp8(query, page, place.offset)
                                                                  : score_mxfp4(query, page, place.offset);
      scored[t] = {score_key(float(score)), global_of(args.shard, local).value()};
    }
  });
}

/// Writes `valid` tokens, given by their ids in ascending order, and their physical rows, then -1.
template <class TokenAt>
void write_selection(const IndexerArgs& args, int64_t row, int64_t valid, TokenAt token_at) {
  const int32_t* table = args.block_table.row(row / args.q);
  int32_t* tokens = args.topk_tokens.row(row);
  int32_t* rows = args.topk_rows.row(row);
  for (int64_t i = 0; i < valid; ++i) {
    const TokenId token(token_at(i));
    tokens[i] = token.value();
    rows[i] = physical_row(kv_place(table, args.page, local_of(args.shard, token)), args.stride_rows).value();
  }
  fill_rest(tokens, valid, args.model->config.topk);
  fill_rest(rows, valid, args.model->config.topk);
  args.valid(row) = int32_t(valid);
}

void write_candidates(const IndexerArgs& args, int64_t row, std::span<const Candidate> best) {
  Candidate* out = args.candidates.row(row);
  std::copy(best.begin(), best.end(), out);
  std::fill(out + best.size(), out + args.model->config.topk, Candidate{0, INT32_MAX});
}

void run_row(const IndexerArgs& args, int64_t row, const Workspace& workspace) {
  const int topk = args.model->config.topk;
  const int heads = args.model->sizes.index_heads;
  const bool alone = args.shard.ranks == 1;
  const int64_t n = keys_seen(args.seq_lens(row / args.q), args.q, int(row % args.q));
  if (n <= topk) {  // every token is selected and no score is needed; at D > 1 the merge does the same
    if (alone) write_selection(args, row, n, [](int64_t i) { return int32_t(i); });
    return;
  }
  double* values = reinterpret_cast<double*>(workspace.scratch.data());
  for (int64_t i = 0; i < query_values(heads); ++i) values[i] = kE4m3[args.index_query.row(row)[i]];
  Candidate* scored = reinterpret_cast<Candidate*>(values + query_values(heads));

  const int64_t local_n = local_count(args.shard, n);
  score_tokens(args, row, {values, args.head_weights.row(row), heads}, local_n, scored, *workspace.threads);
  const auto best = select_best({scored, size_t(local_n)}, std::min<int64_t>(topk, local_n));
  if (alone) {
    write_selection(args, row, topk, [&](int64_t i) { return best[size_t(i)].token; });
  } else {
    write_candidates(args, row, best);
  }
}

/// One row's query and scores at a time.
int64_t scratch_bytes(const ShapeKey& shape, int) {
  return query_values(shape.sizes.index_heads) * int64_t(sizeof(double)) +
         shape.max_context * int64_t(sizeof(Candidate));
}

void run(const IndexerArgs& args, const Workspace& workspace) {
  for (int64_t row = 0; row < args.index_query.extent(0); ++row) run_row(args, row, workspace);
}

constexpr Kernel<IndexerArgs> kKernels[] = {{"reference", accept_all, scratch_bytes, run}};

}  // namespace

std::span<const Kernel<IndexerArgs>> indexer_kernels() { return kKernels; }

}  // namespace dsacore::reference
