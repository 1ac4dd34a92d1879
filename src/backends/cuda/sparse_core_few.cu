// Sparse core for few heads: the entry in the list, the launch, and the merge where no value kernel does it.
#include <algorithm>
#include <bit>
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
};

template <KvFormat Format, int Keys>
FewHeadsVariant variant() {
  static_assert(kRingAt<Format, Keys> + kStages * FewHeadsShared<Format, Keys>::kTileBytes <= kSharedLimit);
  return {few_heads_kernel<Format, Keys>, kRingAt<Format, Keys>, FewHeadsShared<Format, Keys>::kTileBytes};
}
template <int Keys>
FewHeadsVariant variant(KvFormat format) {
  switch (format) {
    case KvFormat::kFp8DsMla: return variant<KvFormat::kFp8DsMla, Keys>();
    case KvFormat::kFp8: return variant<KvFormat::kFp8, Keys>();
    case KvFormat::kNvfp4DsMla: break;
  }
  return variant<KvFormat::kNvfp4DsMla, Keys>();
}
FewHeadsVariant variant(KvFormat format, int tile_keys) {
  return tile_keys == 32 ? variant<32>(format) : variant<64>(format);
}

int heads_of(const ShapeKey& shape) { return shape.sizes.heads * shape.ranks; }

Verdict accepts(const ShapeKey& shape) {
  if (heads_of(shape) <= kFewHeadsMax) return {};
  return {false, "takes 1 to 16 heads, not " + std::to_string(heads_of(shape))};
}

/// Enough for any number of live rows.
int64_t scratch_bytes(const ShapeKey& shape, int) {
  int64_t bytes = 0;
  for (int rows = 1; rows <= shape.rows; ++rows) {
    bytes = std::max(bytes, Parts::bytes(rows, few_heads_plan(rows, shape.topk).splits, heads_of(shape)));
  }
  return bytes;
}

void prepare(const ShapeKey& shape) {
  for (const int tile_keys : {32, 64}) allow_shared(variant(shape.kv_format, tile_keys).kernel, kSharedLimit);
}

/// One chunk of one head for a tile of rows.
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const __grid_constant__ MergeArgs args) {
  __shared__ MergeShared shared;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int chunk = int(blockIdx.x) % kChunks, other = int(blockIdx.x) / kChunks;
  merge_chunk<kUnitSplits>(shared, args, other / args.heads * args.tile_rows(), other % args.heads, chunk);
}

void run(const SparseCoreArgs& args, const Workspace& workspace) {
  const int rows = int(args.latent.extent(0));
  const FewHeadsPlan plan = few_heads_plan(rows, int(args.topk_rows.extent(1)));
  const FewHeadsVariant v = variant(args.kv.format, plan.tile_keys);
  const int stages = std::min(plan.tiles, kStages);
  launch(v.kernel,
         {.grid = dim3(unsigned(rows * plan.splits)),
          .block = dim3(kFewHeadsThreads),
          .shared_bytes = size_t(v.ring_at + stages * v.tile_bytes)},
         workspace,
         FewHeadsArgs{.query = args.query,
                      .topk_rows = args.topk_rows,
                      .valid = args.valid,
                      .cache = args.kv.data,
                      .parts = Parts::in(workspace.scratch.data(), rows, plan.splits, args.query.heads),
                      .scale = args.model->attention_scale(),
                      .plan = plan,
                      .split_bits = std::countr_zero(unsigned(plan.splits)),
                      .stages = stages});
  if (args.leaves_parts) return;
  const MergeArgs merge = merge_args(args, workspace.scratch.data());
  launch(merge_parts,
         {.grid = dim3(unsigned(merge.tiles() * args.query.heads * kChunks)), .block = dim3(kMergeThreads)}, workspace,
         merge);
}

}  // namespace

const Kernel<SparseCoreArgs> kFewHeads = {.name = "few_heads",
                                          .accepts = accepts,
                                          .scratch_bytes = scratch_bytes,
                                          .run = run,
                                          .prepare = prepare,
                                          .parts = true};

}  // namespace dsacore::cuda
