// PreparedLayer::Impl: what prepare leaves for run. prepare.cpp fills it, check_step.cpp checks a step against it,
// run.cpp walks the stages.
#pragma once

#include <string>
#include <vector>

#include "dsacore/layer.h"
#include "layer/box.h"
#include "layer/context.h"
#include "layer/model.h"
#include "memory/aligned_bytes.h"
#include "plan/choose.h"
#include "plan/tables.h"

namespace dsacore {

/// The plan of one prepared (B, q).
struct PreparedShape {
  ShapeKey key;
  int64_t pitch_elems = 0;
  OverlapMode overlap = OverlapMode::kSerial;
  PartialFormat partial = PartialFormat::kBf16;  ///< under DCP
  const Kernel<QueryArgs>* query = nullptr;
  const Kernel<IndexProjectionArgs>* index_projection = nullptr;
  const Kernel<IndexerArgs>* indexer = nullptr;
  const Kernel<CandidateMergeArgs>* candidate_merge = nullptr;
  const Kernel<SparseCoreArgs>* sparse_core = nullptr;
  const Kernel<PartialMergeArgs>* partial_merge = nullptr;
  const Kernel<ValueArgs>* value = nullptr;
  const Kernel<GateArgs>* gate = nullptr;
};

/// The tensors between the stages, as records in the context's arena.
struct StageBuffers {
  const AlignedBytes* q_c = nullptr;           ///< BF16 [B, q_lora]
  const AlignedBytes* query = nullptr;         ///< [B, H, 576]
  const AlignedBytes* index_query = nullptr;   ///< e4m3 [B, index_heads, 128]
  const AlignedBytes* head_weights = nullptr;  ///< F32 [B, index_heads]
  const AlignedBytes* topk_tokens = nullptr;   ///< I32 [B, topk]
  const AlignedBytes* topk_rows = nullptr;     ///< I32 [B, topk]
  const AlignedBytes* valid = nullptr;         ///< I32 [B]
  const AlignedBytes* latent = nullptr;        ///< BF16 [B, H, 512]
  const AlignedBytes* lse = nullptr;           ///< F32 [B, H]
  const AlignedBytes* kernel = nullptr;        ///< scratch of one kernel at a time
  // Under DCP:
  const AlignedBytes* all_query = nullptr;       ///< [B, D*H, 576]
  const AlignedBytes* candidates = nullptr;      ///< [B, topk]
  const AlignedBytes* all_candidates = nullptr;  ///< [D, B, topk]
  const AlignedBytes* local_valid = nullptr;     ///< I32 [B]
  const AlignedBytes* partial_latent = nullptr;  ///< BF16 [B, D*H, 512]
  const AlignedBytes* partial_v = nullptr;       ///< BF16 [B, D*H, 128]
  const AlignedBytes* partial_lse = nullptr;     ///< F32 [B, D*H]
  const AlignedBytes* sent = nullptr;            ///< BF16 [D, B, H, 512 or 128]: partials of this rank's heads
  const AlignedBytes* sent_lse = nullptr;        ///< F32 [D, B, H]
  const AlignedBytes* merged_v = nullptr;        ///< BF16 [B, H*128]
};

class PreparedLayer::Impl {
 public:
  Impl(Context& context, const LayerConfig& config, const LayerWeights& weights, const PrepareOptions& options);

  void bind(const KvCache& kv_cache, const IndexCache& index_cache);
  Status run(const Step& step) noexcept;

  /// Every refusal of spec 10 that a step can earn; writes nothing.
  Status check(const Step& step, const PreparedShape** shape) const;

  StageViews stages() const;

  Context::Impl& context;
  OwnedModel owned;
  const LayerModel& model() const { return owned.model; }
  Box* box;
  RankShard shard;
  int64_t max_context;
  int64_t cache_pages;
  std::vector<PreparedShape> shapes;
  AlignedBytes packed;       ///< weights in the order that the backend's kernels read
  AlignedBytes gathered_uv;  ///< DCP `proj`: W_UV transposed of all ranks' heads, BF16 [D*H, 128, 512]
  StageBuffers buffers;

  bool bound = false;
  KvCache kv;
  IndexCache index;

  // Of the last run.
  int last_rows = 0;
  PartialFormat last_partial = PartialFormat::kBf16;
  std::vector<StageTime>* times = nullptr;

 private:
  void choose_kernels(const PrepareOptions& options);
  void reserve();

  struct RunState;
  Status run_stages(const Step& step, const PreparedShape& shape);
  Status run_ranks(RunState& state);
  void finish_empty_rows(const RunState& state);
};

}  // namespace dsacore
