// The stages of the cuda backend, each a list of kernels in order of preference. One file (or a few with one name) a
// list.
#pragma once

#include <span>

#include "plan/registry.h"

namespace dsacore::cuda {

std::span<const Kernel<QueryArgs>> query_kernels();
/// Step 1 alone, for a chain whose index projection goes before its query stage: writes q_c, with the bits of every
/// query kernel, and nothing else. Needs no scratch.
void enqueue_query_norm(const QueryArgs& args, const Workspace& workspace);
std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels();
std::span<const Kernel<IndexerArgs>> indexer_kernels();
std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels();
std::span<const Kernel<ValueArgs>> value_kernels();
std::span<const Kernel<GateArgs>> gate_kernels();

/// Enqueues it, if there is such a row. May stand anywhere behind the kernels that read these buffers before.
void enqueue_pad(const PadArgs& args, const Workspace& workspace);

}  // namespace dsacore::cuda
