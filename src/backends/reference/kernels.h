// The reference backend's stages: plain code written from spec.md, the yardstick of every other backend. Sums are FP64
// and values are rounded where the specification rounds them and nowhere else; it shares no kernel code with other
// backends.
#pragma once

#include <span>

#include "plan/registry.h"

namespace dsacore::reference {

std::span<const Kernel<QueryArgs>> query_kernels();
std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels();
std::span<const Kernel<IndexerArgs>> indexer_kernels();
std::span<const Kernel<CandidateMergeArgs>> candidate_merge_kernels();
std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels();
std::span<const Kernel<ValueArgs>> value_kernels();
std::span<const Kernel<GateArgs>> gate_kernels();
std::span<const Kernel<PartialMergeArgs>> partial_merge_kernels();

/// The `accepts` and `scratch_bytes` of a kernel that takes every shape and needs no scratch.
inline Verdict accept_all(const ShapeKey&) { return {}; }
inline int64_t no_scratch(const ShapeKey&, int) { return 0; }

}  // namespace dsacore::reference
