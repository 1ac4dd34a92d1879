// Sparse core for few heads: the entry in the list, and the launch.
#include <algorithm>
#include <bit>
#include <string>

#include "backends/cuda/launch.h"
#include "backends/cuda/sparse_core_few.cuh"
#include "backends/cuda/sparse_core_kernels.h"

namespace dsacore::cuda {
namespace {

using KernelFunction = void (*)(FewHeadsArgs);

/// A kernel and how its shared memory is cut.
struct FewHeadsVariant {
  KernelFunction kernel;
  int ring_at;
  int tile_bytes;
  int over_tiles_at;  ///< where the neighbours' parts may overwrite tiles
};

template <KvFormat Format, int Keys>
FewHeadsVariant variant() {
  return {few_heads_kernel<Format, Keys>, kRingAt<Format, Keys>, FewHeadsShared<Format, Keys>::kTileBytes,
          kExpandedAt<Format, Keys>};
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

struct SharedPlan {
  int stages;
  int received_at;
  int bytes;
};
SharedPlan shared_plan(const FewHeadsVariant& v, const FewHeadsPlan& plan, int heads) {
  constexpr int kStages = 2;
  const int stages = std::min(plan.tiles, kStages);
  const int ring_end = v.ring_at + stages * v.tile_bytes;
  const int received = received_bytes(heads, plan.cluster);
  if (plan.tiles == 1 && ring_end + received <= kSharedLimit) return {stages, ring_end, ring_end + received};
  return {stages, 0, std::max(ring_end, v.over_tiles_at + received)};
}

int heads_of(const ShapeKey& shape) { return shape.sizes.heads * shape.ranks; }

Verdict accepts(const ShapeKey& shape) {
  if (heads_of(shape) <= kFewHeadsMax) return {};
  return {false, "takes 1 to 16 heads, not " + std::to_string(heads_of(shape))};
}

constexpr int64_t kArrivalBytes = int64_t(kMaxRows) * kFewHeadsMax * int64_t(sizeof(uint32_t));

/// Enough for any number of live rows.
int64_t scratch_bytes(const ShapeKey& shape, int) {
  int64_t floats = 0;
  for (int rows = 1; rows <= shape.rows; ++rows) {
    const FewHeadsPlan plan = few_heads_plan(rows, shape.topk);
    if (plan.groups == 1) continue;
    floats = std::max(floats, rows * plan.groups * plan.cluster * part_floats(heads_of(shape), plan.cluster));
  }
  return kArrivalBytes + floats * int64_t(sizeof(float));
}

void prepare(const ShapeKey& shape) {
  for (const int tile_keys : {32, 64}) {
    allow_shared(variant(shape.kv_format, tile_keys).kernel, kSharedLimit, /*wide_clusters=*/true);
  }
}

void run(const SparseCoreArgs& args, const Workspace& workspace) {
  const int rows = int(args.latent.extent(0));
  const FewHeadsPlan plan = few_heads_plan(rows, int(args.topk_rows.extent(1)));
  const FewHeadsVariant v = variant(args.kv.format, plan.tile_keys);
  const SharedPlan shared = shared_plan(v, plan, args.query.heads);
  launch(v.kernel,
         {.grid = dim3(unsigned(rows * plan.groups * plan.cluster)),
          .block = dim3(kFewHeadsThreads),
          .shared_bytes = size_t(shared.bytes),
          .cluster = plan.cluster},
         workspace,
         FewHeadsArgs{.query = args.query,
                      .topk_rows = args.topk_rows,
                      .valid = args.valid,
                      .cache = args.kv.data,
                      .latent = args.latent,
                      .lse = args.lse,
                      .arrivals = reinterpret_cast<uint32_t*>(workspace.scratch.data()),
                      .parts = reinterpret_cast<float*>(workspace.scratch.data() + kArrivalBytes),
                      .scale = args.model->attention_scale(),
                      .k_scale = args.model->k_scale,
                      .plan = plan,
                      .cluster_bits = std::countr_zero(unsigned(plan.cluster)),
                      .group_bits = std::countr_zero(unsigned(plan.groups)),
                      .slice_bits = std::countr_zero(unsigned(kLatent / plan.cluster)),
                      .stages = shared.stages,
                      .received_at = shared.received_at});
}

}  // namespace

const Kernel<SparseCoreArgs> kFewHeads = {"few_heads", accepts, scratch_bytes, run, prepare};

}  // namespace dsacore::cuda
