// PreparedLayer::Impl: what prepare leaves for run. prepare.cpp fills it, check_step.cpp checks a step against it,
// run.cpp walks the stages.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "dsacore/layer.h"
#include "layer/box.h"
#include "layer/context.h"
#include "layer/model.h"
#include "memory/memory.h"
#include "plan/plan.h"

namespace dsacore {

/// Scratch of one kernel for one shape: the first `bytes` of `block`.
struct KernelScratch {
  const MemoryBlock* block = nullptr;
  int64_t bytes = 0;
};

/// One prepared (B, q) of a layer.
struct PreparedShape {
  ShapeKey key;
  int64_t pitch_elems = 0;
  const Plan* plan = nullptr;                  ///< of the context; for B or more rows
  std::array<KernelScratch, kStages> scratch;  ///< by StageId, for B rows
};

/// The tensors between the stages, as records in the context's arena.
struct StageBuffers {
  const MemoryBlock* q_c = nullptr;           ///< BF16 [B, q_lora]
  const MemoryBlock* query = nullptr;         ///< [B, H, 576]
  const MemoryBlock* index_query = nullptr;   ///< e4m3 [B, index_heads, 128]
  const MemoryBlock* head_weights = nullptr;  ///< F32 [B, index_heads]
  const MemoryBlock* topk_tokens = nullptr;   ///< I32 [B, topk]
  const MemoryBlock* topk_rows = nullptr;     ///< I32 [B, topk]
  const MemoryBlock* valid = nullptr;         ///< I32 [B]
  const MemoryBlock* latent = nullptr;        ///< BF16 [B, H, 512]
  const MemoryBlock* lse = nullptr;           ///< F32 [B, H]
  // Where steps are checked on a device:
  const MemoryBlock* checked_slots = nullptr;        ///< I64 [B]
  const MemoryBlock* checked_index_slots = nullptr;  ///< I64 [B]
  const MemoryBlock* checked_lengths = nullptr;      ///< I32 [B]
  // Under DCP:
  const MemoryBlock* all_query = nullptr;       ///< [B, D*H, 576]
  const MemoryBlock* candidates = nullptr;      ///< [B, topk]
  const MemoryBlock* all_candidates = nullptr;  ///< [D, B, topk]
  const MemoryBlock* local_valid = nullptr;     ///< I32 [B]
  const MemoryBlock* partial_latent = nullptr;  ///< BF16 [B, D*H, 512]
  const MemoryBlock* partial_v = nullptr;       ///< BF16 [B, D*H, 128]
  const MemoryBlock* partial_lse = nullptr;     ///< F32 [B, D*H]
  const MemoryBlock* sent = nullptr;            ///< BF16 [D, B, H, 512 or 128]: partials of this rank's heads
  const MemoryBlock* sent_lse = nullptr;        ///< F32 [D, B, H]
  const MemoryBlock* merged_v = nullptr;        ///< BF16 [B, H*128]
};

class PreparedLayer::Impl {
 public:
  Impl(Context& context, const LayerConfig& config, const LayerWeights& weights, const PrepareOptions& options);

  void bind(const KvCache& kv_cache, const IndexCache& index_cache);
  Status run(const Step& step, Queue queue) noexcept;
  Status run_stage(const Step& step, StageId stage, Queue queue) noexcept;
  Status inputs_status();
  std::vector<std::string_view> stage_names(int rows, int q) const;
  /// Null: not prepared.
  const PreparedShape* find_shape(int rows, int q) const;

  /// Every refusal of spec 10 that a step can earn; writes nothing. Of tensors on a device it sees shapes alone.
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
  bool checks_inputs;
  MemoryBlock packed;       ///< weights in the order that the backend's kernels read
  MemoryBlock gathered_uv;  ///< DCP `proj`: W_UV transposed of all ranks' heads, BF16 [D*H, 128, 512]
  StageBuffers buffers;

  MemoryBlock input_record;  ///< one InputRecord, where steps are checked on a device
  bool bound = false;
  KvCache kv;
  IndexCache index;

  // Of the last run.
  int last_rows = 0;
  PartialFormat last_partial = PartialFormat::kBf16;
  std::vector<StageTime>* times = nullptr;

 private:
  void choose_plans(const PrepareOptions& options);
  Plan choose_plan(const PrepareOptions& options, const Tables& tables, const ShapeKey& shape) const;
  void reserve();

  Status check_shapes(const Step& step, const PreparedShape** shape) const;
  Status check_contents(const Step& step, const PreparedShape& shape) const;

  InputCheckArgs input_check(const Step& step, const PreparedShape* shape) const;
  Step checked(const Step& step, const PreparedShape& shape, Queue queue);

  struct RunState;
  RunState begin(const Step& step, const PreparedShape& shape, Queue queue);
  Status run_stages(const Step& step, const PreparedShape& shape, Queue queue);
  void run_launches(RunState& state);
  void run_one(RunState& state, StageId stage);
  IndexerArgs indexer_args(const RunState& state) const;
  SparseCoreArgs sparse_core_args(const RunState& state) const;
  Status run_ranks(RunState& state);
  void finish_empty_rows(const RunState& state);
};

}  // namespace dsacore
