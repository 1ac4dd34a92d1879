// Plan: what prepare chooses for (rows, q): a kernel for each stage, where they run, and why not the other kernels. It
// follows from its key alone: nothing of a layer's weights, caches or steps is in it, so that layers and batches share
// it.
#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "dsacore/formats.h"
#include "plan/choose.h"
#include "plan/overlap.h"
#include "plan/registry.h"
#include "plan/tables.h"

namespace dsacore {

/// Everything that a plan follows from, beside the backend.
struct PlanKey {
  ShapeKey shape;                            ///< `rows`: the most that a step may have
  std::array<std::string, kStages> kernels;  ///< by StageId: what the tables say for these rows
  OverlapMode overlap = OverlapMode::kSerial;
  OverlapMode unfused_overlap = OverlapMode::kSerial;
  std::optional<PartialFormat> partial{};  ///< of a box; nothing: one rank

  bool operator==(const PlanKey&) const = default;
};

/// `partial`: as for PlanKey; `kAuto` takes the tables' one.
PlanKey plan_key(const ShapeKey& shape, const Tables& tables, std::optional<PartialFormat> partial);

struct Plan {
  PlanKey key;
  OverlapMode overlap = OverlapMode::kSerial;  ///< host backends: as asked for, though they run it as serial
  LaunchList launches;                         ///< of one rank
  const Kernel<NormArgs>* norm = nullptr;      ///< null: the mode needs none
  const Kernel<QueryArgs>* query = nullptr;
  const Kernel<IndexProjectionArgs>* index_projection = nullptr;
  const Kernel<IndexerArgs>* indexer = nullptr;
  const Kernel<CandidateMergeArgs>* candidate_merge = nullptr;
  const Kernel<SparseCoreArgs>* sparse_core = nullptr;
  const Kernel<PartialMergeArgs>* partial_merge = nullptr;
  const Kernel<ValueArgs>* value = nullptr;
  const Kernel<GateArgs>* gate = nullptr;
  std::array<std::vector<PassedOver>, kStages> others;  ///< by StageId

  /// Whether `q_c` has been written before the query may start: by the norm, or by the front.
  bool query_finds_q_c() const { return is_late(overlap); }
  bool front_leaves_q_c() const { return overlap == OverlapMode::kLateFront; }
  PartialFormat partial() const { return key.partial.value_or(PartialFormat::kBf16); }
  /// Calls `visit(stage, kernel)` for each chosen kernel, in the order of the stages.
  template <class Visit>
  void for_each_kernel(Visit visit) const {
    const auto one = [&](StageId stage, const auto* kernel) {
      if (kernel != nullptr) visit(stage, *kernel);
    };
    one(StageId::kNorm, norm);
    one(StageId::kQuery, query);
    one(StageId::kIndexProjection, index_projection);
    one(StageId::kIndexer, indexer);
    one(StageId::kCandidateMerge, candidate_merge);
    one(StageId::kSparseCore, sparse_core);
    one(StageId::kPartialMerge, partial_merge);
    one(StageId::kValueProjection, value);
    one(StageId::kGate, gate);
  }
};

/// Chooses; touches no device. Throws what `choose` throws.
Plan make_plan(const Backend& backend, bool has_side, const PlanKey& key);

/// Whether two plans run the same kernels in the same mode: a step then gets the same bits from either.
bool run_alike(const Plan& a, const Plan& b);

/// The plans of a context, each kept once.
class Plans {
 public:
  explicit Plans(Device* device) : device_(device) {}

  /// The plan with this key, which stays where it is. A new one is made ready to run: what its kernels must set on the
  /// device, which is current, and the side queue.
  const Plan& keep(const Plan& plan);
  int size() const { return int(plans_.size()); }
  const Plan& last() const { return plans_.back(); }

 private:
  Device* device_;
  std::deque<Plan> plans_;
};

}  // namespace dsacore
