// Sparse core for many heads, host side: the plan, the entry, and the merge of splits.
#include "backends/cuda/sparse_core_many.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/sparse_core_kernels.h"
#include "backends/cuda/sparse_core_many_merge.cuh"
#include "format/layouts.h"

namespace dsacore::cuda {
namespace {

constexpr int kColumns[] = {24, 48};
constexpr int kSms = 132;

/// SM clocks, for comparison alone: of a tile, of a CTA's start and end, of the second kernel.
constexpr int64_t tile_clocks(int columns) { return columns == 24 ? 1500 : 2000; }
constexpr int64_t kCtaClocks = 4000, kMergeClocks = 3000;
constexpr int64_t kPartBytesAClock = 12;  ///< of an SM, to write a part and to read it

int64_t clocks_of(const ManyHeadsPlan& plan, int rows, int heads, int tiles) {
  const int64_t waves = (plan.ctas(rows) + kSms - 1) / kSms;
  const int64_t clocks = waves * (kCtaClocks + (tiles + plan.splits - 1) / plan.splits * tile_clocks(plan.columns));
  if (plan.splits == 1) return clocks;
  return clocks + kMergeClocks + int64_t(rows) * heads * plan.splits * kLatent * 4 / kSms / kPartBytesAClock;
}

/// Bytes of the parts of a plan, the sums behind them.
int64_t part_bytes(const ManyHeadsPlan& plan, int rows, int heads) {
  const int64_t parts = plan.splits == 1 ? 0 : int64_t(rows) * heads * plan.splits;
  return parts * (kLatent * int64_t(sizeof(float)) + int64_t(sizeof(SplitSum)));
}

Verdict accepts(const ShapeKey& shape) {
  const int heads = shape.sizes.heads * shape.ranks;
  if (heads < 1 || heads > kMaxHeads) return {false, "takes 1 to 128 heads, not " + std::to_string(heads)};
  if (shape.topk < 1 || shape.topk > kMaxTopk) return {false, "takes a topk of 1 to 2048, not " + std::to_string(shape.topk)};
  if (shape.rows < 1 || shape.rows > kMaxRows) return {false, "takes 1 to 256 rows, not " + std::to_string(shape.rows)};
  return {};
}

/// Fewer live rows than the shape's may want more splits.
int64_t scratch_bytes(const ShapeKey& shape, int) {
  const int heads = shape.sizes.heads * shape.ranks;
  int64_t bytes = 0;
  for (int rows = 1; rows <= shape.rows; ++rows) {
    bytes = std::max(bytes, part_bytes(many_heads_plan(rows, heads, shape.topk), rows, heads));
  }
  return bytes;
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
  const double scale = double(model.attention_scale()) * std::numbers::log2e *
                       (format == KvFormat::kNvfp4DsMla ? double(kNvfp4Unit) : 1.0);
  ManyHeadsArgs many = {.query = args.query,
                        .topk_rows = args.topk_rows,
                        .valid = args.valid,
                        .cache = args.kv.data,
                        .latent = args.latent,
                        .lse = args.lse,
                        .parts = reinterpret_cast<float*>(workspace.scratch.data()),
                        .part_sums = nullptr,
                        .scale_high = float(scale),
                        .scale_low = float(scale - double(float(scale))),
                        .latent_scale = format == KvFormat::kNvfp4DsMla ? kNvfp4Unit : model.k_scale,
                        .plan = many_heads_plan(rows, heads, int(args.topk_rows.extent(1)))};
  many.part_sums = reinterpret_cast<SplitSum*>(many.parts + int64_t(rows) * heads * many.plan.splits * kLatent);
  with_layout(format, [&](auto layout) {
    ManyHeadsKernel<decltype(layout)>::launch(many, workspace);
    return 0;
  });
  if (many.plan.splits == 1) return;
  const int readers = (many.plan.splits + kMergeSplits - 1) / kMergeSplits;
  const LaunchShape shape = {.grid = {unsigned(heads), unsigned(rows)}, .block = unsigned(readers * kMergeThreads)};
  cuda::launch(merge_splits, shape, workspace, many);
}

}  // namespace

ManyHeadsPlan many_heads_plan(int rows, int heads, int topk) {
  const int tiles = (topk + kManyHeadsTile - 1) / kManyHeadsTile;
  ManyHeadsPlan best = {};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int columns : kColumns) {
    const int groups = (heads + columns - 1) / columns;
    for (int splits = 1; splits <= std::min(tiles, kManyHeadsSplits); ++splits) {
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
