// The stages by name, in the order in which a step runs them.
#pragma once

#include <array>
#include <string_view>

namespace dsacore {

enum class StageId {
  kNorm,  ///< of q_a alone, where the query comes later
  kQuery,
  kIndexProjection,
  kIndexer,
  kCandidateMerge,
  kSparseCore,
  kPartialMerge,
  kValueProjection,
  kGate,
};
inline constexpr int kStages = 9;
inline constexpr std::array<std::string_view, kStages> kStageNames = {
    "norm", "query", "index_projection", "indexer", "candidate_merge", "sparse_core", "partial_merge", "value", "gate"};

constexpr std::string_view name_of(StageId stage) { return kStageNames[static_cast<size_t>(stage)]; }

}  // namespace dsacore
