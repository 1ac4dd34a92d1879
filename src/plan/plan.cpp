#include "plan/plan.h"

#include <algorithm>

namespace dsacore {
namespace {

/// The index projection of the front modes: the first front that the tables let it take and that accepts.
const Kernel<IndexProjectionArgs>* find_front(const Backend& backend, const PlanKey& key) {
  for (const Kernel<IndexProjectionArgs>& kernel : backend.index_projection) {
    const std::string& word = key.kernels[static_cast<size_t>(StageId::kIndexProjection)];
    if (kernel.front && allows(word, kernel.name) && kernel.accepts(key.shape).ok) return &kernel;
  }
  return nullptr;
}

const Kernel<NormArgs>* find_norm(const Backend& backend, const ShapeKey& shape) {
  for (const Kernel<NormArgs>& kernel : backend.norm) {
    if (kernel.accepts(shape).ok) return &kernel;
  }
  return nullptr;
}

/// Puts the front in the place of the index projection that the tables name.
void take_front(Plan& plan, const Kernel<IndexProjectionArgs>* front) {
  std::vector<PassedOver>& others = plan.others[static_cast<size_t>(StageId::kIndexProjection)];
  for (PassedOver& other : others) {
    if (other.kernel == front->name) {
      other = {plan.index_projection->name, "overlap " + std::string(name_of(plan.overlap)) + " takes a front"};
    }
  }
  plan.index_projection = front;
}

/// The mode, what it takes other kernels for, and the launches.
void plan_launches(Plan& plan, const Backend& backend, bool has_side) {
  const PlanKey& key = plan.key;
  const Kernel<IndexProjectionArgs>* front = find_front(backend, key);
  const Kernel<NormArgs>* norm = find_norm(backend, key.shape);
  OverlapTraits traits;
  traits.ranks = key.shape.ranks;
  traits.has_side = has_side;
  traits.norm = norm != nullptr && !plan.index_projection->front;
  traits.front = front != nullptr;
  traits.fused_indexer = plan.indexer->fused;
  const OverlapMode mode = effective_mode(key.overlap, key.unfused_overlap, traits);
  plan.overlap = has_side ? mode : key.overlap;
  if (is_front(mode) && front != plan.index_projection) take_front(plan, front);
  plan.for_each_kernel(
      [&](StageId stage, const auto& kernel) { traits.held[static_cast<size_t>(stage)] = kernel.held; });
  plan.launches = LaunchList(mode, traits);
  if (plan.launches.has_norm()) plan.norm = norm;
}

}  // namespace

PlanKey plan_key(const ShapeKey& shape, const Tables& tables, std::optional<PartialFormat> partial) {
  PlanKey key{.shape = shape, .kernels = {}};
  for (size_t stage = 0; stage < key.kernels.size(); ++stage) {
    key.kernels[stage] = tables.kernel_of(StageId(stage), shape.index_format, shape.q, shape.rows);
  }
  key.overlap = tables.overlap_of(shape.rows);
  key.unfused_overlap = tables.unfused_overlap_of(shape.rows);
  key.partial = partial;
  if (partial == PartialFormat::kAuto) {
    key.partial = partial_format_of(tables.partial.find(shape.rows).value_or("bf16"));
  }
  return key;
}

Plan make_plan(const Backend& backend, bool has_side, const PlanKey& key) {
  Plan plan;
  plan.key = key;
  ShapeKey shape = key.shape;
  const auto take = [&](StageId stage, const auto& kernels, auto& kernel) {
    auto choice = choose(stage, kernels, shape, key.kernels[static_cast<size_t>(stage)]);
    kernel = choice.kernel;
    plan.others[static_cast<size_t>(stage)] = std::move(choice.others);
  };
  take(StageId::kQuery, backend.query, plan.query);
  take(StageId::kIndexProjection, backend.index_projection, plan.index_projection);
  take(StageId::kIndexer, backend.indexer, plan.indexer);
  take(StageId::kSparseCore, backend.sparse_core, plan.sparse_core);
  shape.parts = plan.sparse_core->parts && !key.partial;
  take(StageId::kValueProjection, backend.value, plan.value);
  if (key.partial) {
    take(StageId::kCandidateMerge, backend.candidate_merge, plan.candidate_merge);
    take(StageId::kPartialMerge, backend.partial_merge, plan.partial_merge);
    take(StageId::kGate, backend.gate, plan.gate);
  }
  plan_launches(plan, backend, has_side);
  return plan;
}

bool run_alike(const Plan& a, const Plan& b) {
  return a.overlap == b.overlap && a.partial() == b.partial() && a.norm == b.norm && a.query == b.query &&
         a.index_projection == b.index_projection && a.indexer == b.indexer && a.candidate_merge == b.candidate_merge &&
         a.sparse_core == b.sparse_core && a.partial_merge == b.partial_merge && a.value == b.value && a.gate == b.gate;
}

const Plan& Plans::keep(const Plan& plan) {
  const auto same = [&](const Plan& kept) { return kept.key == plan.key; };
  const auto found = std::find_if(plans_.begin(), plans_.end(), same);
  if (found != plans_.end()) return *found;
  plan.for_each_kernel([&](StageId, const auto& kernel) {
    if (kernel.prepare != nullptr) kernel.prepare(plan.key.shape);
  });
  if (plan.launches.uses_side()) device_->open_side();
  return plans_.emplace_back(plan);
}

}  // namespace dsacore
