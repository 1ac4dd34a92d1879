// Steps 9 and 10 of spec.md on the device, as two kernels (`fused`) or three (`stock`, kept as a check).
#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/kernels.h"

namespace dsacore::cuda {
namespace {

Verdict accepts(const ShapeKey& shape) {
  const auto refuse = [](const char* what, int64_t value, const char* allowed) {
    return Verdict{false, std::string(what) + " " + std::to_string(value) + ": " + allowed};
  };
  if (shape.ranks != 1) return refuse("ranks", shape.ranks, "1; candidates of several ranks are not written");
  if (shape.sizes.index_heads < kMinIndexHeads || shape.sizes.index_heads > kMaxIndexHeads) {
    return refuse("index heads", shape.sizes.index_heads, "8..64");
  }
  if (shape.q < 1 || shape.q > kMaxQ) return refuse("q", shape.q, "1..8");
  if (shape.rows < 1 || shape.rows > kMaxRows) return refuse("rows", shape.rows, "1..256");
  if (shape.topk < 1 || shape.topk > kMaxTopk) return refuse("topk", shape.topk, "1..2048");
  if (shape.max_context < 1 || shape.max_context > kMaxContext) {
    return refuse("context", shape.max_context, "1..1048576");
  }
  return {};
}

int64_t scratch_bytes(const ShapeKey& shape, int) { return IndexerScratch::bytes(shape); }

void prepare(const ShapeKey& shape) {
  prepare_scores(shape);
  prepare_select(shape);
}

void run_fused(const IndexerArgs& args, const Workspace& workspace) {
  if (args.index_query.extent(0) == 0) return;
  const IndexerScratch scratch(workspace.scratch, args.index_query.extent(0));
  enqueue_scores(args, scratch, true, workspace);
  enqueue_select(args, scratch, workspace);
}

void run_stock(const IndexerArgs& args, const Workspace& workspace) {
  if (args.index_query.extent(0) == 0) return;
  const IndexerScratch scratch(workspace.scratch, args.index_query.extent(0));
  enqueue_scores(args, scratch, false, workspace);
  enqueue_stock_select(args, scratch, workspace);
}

constexpr Kernel<IndexerArgs> kKernels[] = {
    {.name = "fused",
     .accepts = accepts,
     .scratch_bytes = scratch_bytes,
     .run = run_fused,
     .prepare = prepare,
     .fused = true},
    {.name = "stock", .accepts = accepts, .scratch_bytes = scratch_bytes, .run = run_stock, .prepare = prepare_scores},
};

}  // namespace

std::span<const Kernel<IndexerArgs>> indexer_kernels() { return kKernels; }

}  // namespace dsacore::cuda
