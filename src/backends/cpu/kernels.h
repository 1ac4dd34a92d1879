// The cpu backend's stages as lists of kernels, one function a stage. Each returns the list of the Highway target in
// force at the call; targets.cpp asks once per target and keeps the answers, so that no stage call looks a target up
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan/registry.h"

namespace dsacore::cpu {

std::span<const Kernel<QueryArgs>> query_kernels();                       ///< query.cc
std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels();  ///< index_projection.cc
std::span<const Kernel<IndexerArgs>> indexer_kernels();                   ///< indexer.cc
std::span<const Kernel<CandidateMergeArgs>> candidate_merge_kernels();    ///< candidate_merge.cc
std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels();            ///< sparse_core.cc
std::span<const Kernel<ValueArgs>> value_kernels();                       ///< value.cc
std::span<const Kernel<GateArgs>> gate_kernels();                         ///< value.cc
std::span<const Kernel<PartialMergeArgs>> partial_merge_kernels();        ///< partial_merge.cc

/// Bytes of the weights packed for this backend, the same for all of its targets.
int64_t packed_bytes(const LayerSizes& sizes);
/// Packs a layer's weights once, at prepare. `packed` is 64-byte aligned and holds `packed_bytes`.
void pack(const LayerModel& model, std::byte* packed, Threads& threads);

}  // namespace dsacore::cpu
