// Sparse core for few heads: the entry in the list, the launch, and the merge where no value kernel does it.
#include <algorithm>
#include <limits>
#include <string>

#include "backends/cuda/launch.h"
#include "backends/cuda/sparse_core_few.cuh"
#include "backends/cuda/sparse_core_few_merge.cuh"
#include "backends/cuda/sparse_core_kernels.h"

namespace dsacore::cuda {
namespace {

/// A kernel and how its shared memory is cut.
struct FewHeadsVariant {
  void (*kernel)(FewHeadsArgs);
  int ring_at;
  int tile_bytes;
  int value_bytes;  ///< of a tile of widened values

  int shared_bytes(int tiles) const {
    return ring_at + std::min(tiles, kStages) * tile_bytes + std::min(tiles, kValueTiles) * value_bytes;
  }
};

template <KvFormat Format, int Keys, int Sixteens>
FewHeadsVariant variant_of(void (*kernel)(FewHeadsArgs)) {
  using F = FewHeadsFormat<Format>;
  constexpr int kRing = int(sizeof(FewHeadsShared<Format, Keys, Sixteens>));
  constexpr int kValueBytes = kValueTileBytes<Format, Keys>;
  static_assert(kRing + kStages * kTileBytes<Format, Keys> + kValueTiles * kValueBytes <=
                (Sixteens == 1 && !F::kWidened ? kHalfOfShared : kWholeOfShared));
  return {kernel, kRing, kTileBytes<Format, Keys>, kValueBytes};
}
template <KvFormat Format>
FewHeadsVariant variant(int sixteens, int tile_keys) {
  if (sixteens == 2) return variant_of<Format, 64, 2>(few_heads_double<Format, 64>);
  return tile_keys == 32 ? variant_of<Format, 32, 1>(few_heads_single<Format, 32>)
                         : variant_of<Format, 64, 1>(few_heads_single<Format, 64>);
}
FewHeadsVariant variant(KvFormat format, int sixteens, int tile_keys) {
  switch (format) {
    case KvFormat::kFp8DsMla: return variant<KvFormat::kFp8DsMla>(sixteens, tile_keys);
    case KvFormat::kFp8: return variant<KvFormat::kFp8>(sixteens, tile_keys);
    case KvFormat::kNvfp4DsMla: break;
  }
  return variant<KvFormat::kNvfp4DsMla>(sixteens, tile_keys);
}

Verdict accepts(const ShapeKey& shape) {
  if (core_heads(shape) <= kMaxHeads) return {};
  return {false, "takes 1 to 128 heads, not " + std::to_string(core_heads(shape))};
}

int64_t scratch_bytes(const ShapeKey& shape, int) {
  const int heads = core_heads(shape);
  return most_of_rows(
      shape, [&](int rows) { return Parts::bytes(rows, few_heads_plan(rows, heads, shape.topk).splits, heads); });
}

void prepare(const ShapeKey& shape) {
  allow_shared(variant(shape.kv_format, 1, 32).kernel, kWholeOfShared);
  allow_shared(variant(shape.kv_format, 1, 64).kernel, kWholeOfShared);
  allow_shared(variant(shape.kv_format, 2, 64).kernel, kWholeOfShared);
  // A short tile and its widened values take 57 KB, to which the merge's CTAs seem not to fit in the division chosen
  // then.
  if (shape.kv_format == KvFormat::kNvfp4DsMla) prefer_shared(variant(shape.kv_format, 1, 32).kernel);
}

/// One chunk of some rows' heads.
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const __grid_constant__ MergeArgs args) {
  __shared__ MergeShared shared;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int first = int(blockIdx.x) / kChunks * args.cta_rows();
  merge_chunk<kUnitSplits>(shared, args, int(blockIdx.x) % kChunks, [&](int i) {
    return MergePlace{(first + i) / args.heads, (first + i) % args.heads};
  });
}

void run(const SparseCoreArgs& args, const Workspace& workspace) {
  const int rows = int(args.latent.extent(0));
  const FewHeadsPlan plan = few_heads_plan(rows, args.query.heads, int(args.topk_rows.extent(1)));
  const FewHeadsVariant v = variant(args.kv.format, plan.sixteens, plan.tile_keys);
  launch(v.kernel,
         {.grid = dim3(unsigned(plan.groups), unsigned(plan.splits), unsigned(rows)),
          .block = dim3(kFewHeadsThreads),
          .shared_bytes = size_t(v.shared_bytes(plan.tiles))},
         workspace,
         FewHeadsArgs{.query = args.query,
                      .topk_rows = args.topk_rows,
                      .valid = args.valid,
                      .cache = args.kv.data,
                      .parts = Parts::in(workspace.scratch.data(), rows, plan.splits, args.query.heads),
                      .scale = args.model->attention_scale(),
                      .plan = plan,
                      .stages = std::min(plan.tiles, kStages)});
  if (args.leaves_parts) return;
  const MergeArgs merge = merge_args(args, workspace.scratch.data());
  const int ctas = (merge.rows * merge.heads + merge.cta_rows() - 1) / merge.cta_rows() * kChunks;
  launch(merge_parts, {.grid = dim3(unsigned(ctas)), .block = dim3(kMergeThreads)}, workspace, merge);
}

}  // namespace

FewHeadsPlan few_heads_plan(int rows, int heads, int topk) {
  // SM clocks, for comparison alone: of a CTA's start and end, of a tile, and of a head's part, written and read again.
  struct Cta {
    int sixteens;
    int64_t clocks, tile_clocks;
  };
  constexpr Cta kCtas[] = {{1, 4500, 2100}, {2, 6500, 3300}};
  constexpr int kPartClocks = 1;
  FewHeadsPlan best = {};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Cta& cta : kCtas) {
    if (heads <= 16 && cta.sixteens > 1) break;
    const int groups = (heads + 16 * cta.sixteens - 1) / (16 * cta.sixteens);
    // Short tiles where every CTA then has one of them, and all run at once.
    const int tile_keys = cta.sixteens == 1 && rows * groups * ((topk + 31) / 32) <= kMultiprocessors ? 32 : 64;
    const int tiles = (topk + tile_keys - 1) / tile_keys;
    for (int cta_tiles = tiles; cta_tiles >= 1; --cta_tiles) {
      const int splits = (tiles + cta_tiles - 1) / cta_tiles;
      const int waves = (rows * groups * splits + kMultiprocessors - 1) / kMultiprocessors;
      const int64_t clocks =
          waves * (cta.clocks + cta_tiles * cta.tile_clocks) + int64_t(rows) * splits * heads * kPartClocks;
      if (clocks >= least) continue;
      least = clocks;
      best = {cta.sixteens, tile_keys, cta_tiles, splits, groups, (heads + groups - 1) / groups};
    }
  }
  return best;
}

const Kernel<SparseCoreArgs> kFewHeads = {.name = "few_heads",
                                          .accepts = accepts,
                                          .scratch_bytes = scratch_bytes,
                                          .run = run,
                                          .prepare = prepare,
                                          .parts = true};

}  // namespace dsacore::cuda
