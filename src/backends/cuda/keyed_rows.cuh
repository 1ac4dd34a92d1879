// Rows whose scores are there as ordered keys, of which step 10 selects: the parameter of every kernel that does.
#pragma once

#include "backends/cuda/indexer_scratch.h"
#include "format/paging.h"
#include "stages/stages.h"

namespace dsacore::cuda {

struct KeyedRows {
  View<const int32_t, 1> seq_lens;
  View<const int32_t, 2> block_table;
  int page;
  int64_t stride_rows;
  int q, topk, context;
  const uint32_t* keys;
  int64_t key_pitch;
  View<int32_t, 2> topk_tokens, topk_rows;
  View<int32_t, 1> valid;
};

inline KeyedRows keyed_rows(const IndexerArgs& args, const IndexerScratch& scratch) {
  return {.seq_lens = args.seq_lens,
          .block_table = args.block_table,
          .page = args.page,
          .stride_rows = args.stride_rows,
          .q = args.q,
          .topk = args.model->config.topk,
          .context = context_of(args, scratch),
          .keys = scratch.keys,
          .key_pitch = scratch.key_pitch,
          .topk_tokens = args.topk_tokens,
          .topk_rows = args.topk_rows,
          .valid = args.valid};
}

/// Keys that a row sees: of a length that the host has not seen, cut to what there is.
__device__ __forceinline__ int keys_of_row(const KeyedRows& p, int row) {
  const int length = min(max(__ldcg(&p.seq_lens(row / p.q)), 0), p.context);
  return int(keys_seen(length, p.q, row % p.q));
}

}  // namespace dsacore::cuda
