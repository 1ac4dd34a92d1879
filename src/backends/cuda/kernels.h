// The stages of the cuda backend, each a list of kernels in order of preference. One file (or a few with one name) a list.
#pragma once

#include <span>

#include "plan/registry.h"

namespace dsacore::cuda {

std::span<const Kernel<QueryArgs>> query_kernels();
std::span<const Kernel<IndexProjectionArgs>> index_projection_kernels();
std::span<const Kernel<IndexerArgs>> indexer_kernels();
std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels();
std::span<const Kernel<ValueArgs>> value_kernels();
std::span<const Kernel<GateArgs>> gate_kernels();

/// What a step leaves in the rows past its live ones (spec 4, 5). Views hold all `B` rows; an empty one is left out.
struct PadArgs {
  int64_t live_rows;             ///< the first row that is written
  View<int32_t, 2> topk_tokens;  ///< [B, topk]: -1
  View<int32_t, 2> topk_rows;    ///< [B, topk]: -1
  View<int32_t, 1> valid;        ///< [B]: 0
  View<BFloat16, 3> latent;      ///< [B, heads, 512]: 0
  View<float, 2> lse;            ///< [B, heads]: -inf
  View<BFloat16, 2> out;         ///< [B, heads*128]: 0
};
/// Enqueues it, if there is such a row. May stand anywhere behind the kernels that read these buffers before.
void enqueue_pad(const PadArgs& args, const Workspace& workspace);

}  // namespace dsacore::cuda
