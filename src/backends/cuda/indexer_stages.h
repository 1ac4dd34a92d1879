// The kernels of the indexer: scores, then either the exact selection by cluster (`fused`), or a plain exact top-k and
// a conversion to rows (`stock`). Each enqueues and returns.
#pragma once

#include "backends/cuda/indexer_scratch.h"
#include "plan/registry.h"
#include "stages/stages.h"

namespace dsacore::cuda {

/// Step 9: the ordered key of every score that is needed, and the histogram of each row where it is asked for.
void enqueue_scores(const IndexerArgs& args, const IndexerScratch& scratch, bool histogram, const Workspace& workspace);
void prepare_scores(const ShapeKey& shape);

/// Step 10 from keys and histograms, which it clears.
void enqueue_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace);
void prepare_select(const ShapeKey& shape);

/// Step 10 from the keys alone: tokens and counts, then rows.
void enqueue_stock_select(const IndexerArgs& args, const IndexerScratch& scratch, const Workspace& workspace);

}  // namespace dsacore::cuda
