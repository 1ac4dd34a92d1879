// Sparse core for many heads, host side: the plan and the entry.
#include <algorithm>
#include <limits>
#include <numbers>
#include <string>

#include "backends/cuda/launch.h"
#include "backends/cuda/sparse_core_kernels.h"
#include "backends/cuda/sparse_core_many.h"
#include "format/layouts.h"

namespace dsacore::cuda {
namespace {

constexpr int kColumns[] = {24, 48};

/// SM clocks, for comparison alone: of a CTA's start and end, of a tile, of a merge, and there of a head's part.
constexpr int64_t kCtaClocks = 9000, kTileClocks = 3400, kMergeClocks = 3000, kPartClocks = 1;

int64_t clocks_of(const ManyHeadsPlan& plan, int rows, int heads, int tiles) {
  const int64_t waves = (plan.ctas(rows) + kMultiprocessors - 1) / kMultiprocessors;
  const int64_t clocks = waves * (kCtaClocks + (tiles + plan.splits - 1) / plan.splits * kTileClocks);
  return plan.splits == 1 ? clocks : clocks + kMergeClocks + int64_t(rows) * heads * plan.splits * kPartClocks;
}

Verdict accepts(const ShapeKey& shape) {
  const int heads = core_heads(shape);
  if (heads < 1 || heads > kMaxHeads) return {false, "takes 1 to 128 heads, not " + std::to_string(heads)};
  if (shape.topk < 1 || shape.topk > kMaxTopk)
    return {false, "takes a topk of 1 to 2048, not " + std::to_string(shape.topk)};
  if (shape.rows < 1 || shape.rows > kMaxRows) return {false, "takes 1 to 256 rows, not " + std::to_string(shape.rows)};
  return {};
}

int64_t scratch_bytes(const ShapeKey& shape, int) {
  return ManyHeadsParts::bytes(most_of_rows(shape, [&](int rows) {
    const ManyHeadsPlan plan = many_heads_plan(rows, core_heads(shape), shape.topk);
    return plan.splits > 1 ? plan.ctas(rows) * plan.columns : 0;
  }));
}

void prepare(const ShapeKey& shape) {
  with_layout(shape.kv_format, [](auto layout) {
    ManyHeadsKernel<decltype(layout)>::prepare();
    return 0;
  });
}

void run(const SparseCoreArgs& args, const Workspace& workspace) {
  const int rows = int(args.valid.extent(0)), heads = args.query.heads;
  if (rows == 0) return;
  const LayerModel& model = *args.model;
  const KvFormat format = args.kv.format;
  // With a scale of 0 nothing could stand for the logit of no key; so small a one gives the same.
  const double scale = model.attention_scale() == 0 ? 0x1p-110
                                                    : double(model.attention_scale()) * std::numbers::log2e *
                                                          (format == KvFormat::kNvfp4DsMla ? double(kNvfp4Unit) : 1.0);
  const ManyHeadsPlan plan = many_heads_plan(rows, heads, int(args.topk_rows.extent(1)));
  const ManyHeadsArgs many = {
      .query = args.query,
      .topk_rows = args.topk_rows,
      .valid = args.valid,
      .cache = args.kv.data,
      .latent = args.latent,
      .lse = args.lse,
      .scale_high = float(scale),
      .scale_low = float(scale - double(float(scale))),
      .latent_scale = format == KvFormat::kNvfp4DsMla ? kNvfp4Unit : model.k_scale,
      .parts = ManyHeadsParts::in(workspace.scratch.data(), int64_t(plan.ctas(rows)) * plan.columns),
      .plan = plan};
  with_layout(format, [&](auto layout) {
    ManyHeadsKernel<decltype(layout)>::launch(many, workspace);
    return 0;
  });
}

}  // namespace

ManyHeadsPlan many_heads_plan(int rows, int heads, int topk) {
  const int tiles = (topk + kManyHeadsTile - 1) / kManyHeadsTile;
  ManyHeadsPlan best = {};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int columns : kColumns) {
    const int groups = (heads + columns - 1) / columns;
    for (int splits = 1; splits <= std::clamp(tiles, 1, kManyHeadsSplits); ++splits) {
      const ManyHeadsPlan plan = {columns, groups, (heads + groups - 1) / groups, splits};
      const int64_t clocks = clocks_of(plan, rows, heads, tiles);
      if (clocks >= least) continue;
      least = clocks;
      best = plan;
    }
  }
  return best;
}

extern const Kernel<SparseCoreArgs> kManyHeads = {"many_heads", accepts, scratch_bytes, run, prepare};

}  // namespace dsacore::cuda
