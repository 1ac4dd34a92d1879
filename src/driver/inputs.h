// Inputs: a layer and a step, borrowed, wherever they came from (files, a synthetic case, a shard of either). What the
// driver runs, shards and judges.
#pragma once

#include <cstdint>

#include "dsacore/problem.h"
#include "format/paging.h"

namespace dsacore {

class Case;

struct Inputs {
  LayerConfig config;
  LayerSizes sizes;
  LayerWeights weights;
  Step step;   ///< `out` is not read: each run brings its own
  KvCache kv;  ///< a run writes its new rows here
  IndexCache index;
};

Inputs inputs_of(const Case& made);

/// Bytes from the first to the last row of the MLA cache, those between its pages included.
inline int64_t cache_bytes(const KvCache& kv) {
  return kv.pages == 0 ? 0 : ((kv.pages - 1) * kv.stride_rows + kv.page) * kv.row_bytes;
}
inline int64_t cache_bytes(const IndexCache& index) { return index.pages * kIndexPage * index.row_bytes; }

/// Longest `seq_len` of the step.
int64_t longest_context(const Step& step);

/// Keys that row `b` of the step sees; 0 for rows past the requests given.
int64_t keys_of_row(const Step& step, int64_t b);

/// Place in the index cache of a token that the inputs' rank holds.
Place index_place_of(const Inputs& inputs, int64_t request, LocalId token);
std::byte* index_page_at(const IndexCache& index, PageId page);

/// Refuses (spec 10) shapes that disagree, and lengths, tables, page ids and slots that point outside the caches: what
/// sharding and judging need before they read a cache by its tables. `run` checks the same of each rank, and more.
void check_inputs(const Inputs& inputs);

}  // namespace dsacore
