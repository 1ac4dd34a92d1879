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

/// Clusters that an H200 holds at once, a CTA an SM (cudaOccupancyMaxActiveClusters).
struct ClusterFit {
  int size, fit;
};
constexpr ClusterFit kClusters[] = {{1, kMultiprocessors}, {2, 66}, {3, 39}, {4, 30}, {6, 17}, {8, 15}, {16, 7}};

/// SM clocks, for comparison alone: of a tile, of a CTA's start and end, and of bringing its heads' latents together.
constexpr int64_t tile_clocks(int columns) { return columns == 24 ? 1700 : 2200; }
constexpr int64_t kCtaClocks = 6000, kMergeClocks = 800, kClusterBytesAClock = 15;

int64_t clocks_of(const ManyHeadsPlan& plan, int fit, int rows, int tiles) {
  const int64_t waves = (int64_t(rows) * plan.groups + fit - 1) / fit;
  int64_t cta = kCtaClocks + (tiles + plan.splits - 1) / plan.splits * tile_clocks(plan.columns);
  if (plan.splits > 1) {
    cta += kMergeClocks + int64_t(plan.columns) * kLatent * 4 / kClusterBytesAClock * (plan.splits - 1) / plan.splits;
  }
  return waves * cta;
}

Verdict accepts(const ShapeKey& shape) {
  const int heads = shape.sizes.heads * shape.ranks;
  if (heads < 1 || heads > kMaxHeads) return {false, "takes 1 to 128 heads, not " + std::to_string(heads)};
  if (shape.topk < 1 || shape.topk > kMaxTopk)
    return {false, "takes a topk of 1 to 2048, not " + std::to_string(shape.topk)};
  if (shape.rows < 1 || shape.rows > kMaxRows) return {false, "takes 1 to 256 rows, not " + std::to_string(shape.rows)};
  return {};
}

int64_t scratch_bytes(const ShapeKey&, int) { return 0; }

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
  const ManyHeadsArgs many = {.query = args.query,
                              .topk_rows = args.topk_rows,
                              .valid = args.valid,
                              .cache = args.kv.data,
                              .latent = args.latent,
                              .lse = args.lse,
                              .scale_high = float(scale),
                              .scale_low = float(scale - double(float(scale))),
                              .latent_scale = format == KvFormat::kNvfp4DsMla ? kNvfp4Unit : model.k_scale,
                              .plan = many_heads_plan(rows, heads, int(args.topk_rows.extent(1)))};
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
    for (const ClusterFit& cluster : kClusters) {
      if (cluster.size > std::max(tiles, 1)) break;
      const ManyHeadsPlan plan = {columns, groups, (heads + groups - 1) / groups, cluster.size};
      const int64_t clocks = clocks_of(plan, cluster.fit, rows, tiles);
      if (clocks >= least) continue;
      least = clocks;
      best = plan;
    }
  }
  return best;
}

extern const Kernel<SparseCoreArgs> kManyHeads = {"many_heads", accepts, scratch_bytes, run, prepare};

}  // namespace dsacore::cuda
