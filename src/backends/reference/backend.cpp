// The reference backend as data: one kernel a stage, none of which packs weights or refuses a shape.
#include "backends/reference/kernels.h"

namespace dsacore {

const Backend& reference_backend() {
  static const Backend backend{
      .name = "reference",
      .target = "scalar",
      .target_data = nullptr,
      .packed_bytes = [](const LayerSizes&) { return int64_t(0); },
      .pack = [](const LayerModel&, std::byte*, Threads&) {},
      .query = reference::query_kernels(),
      .index_projection = reference::index_projection_kernels(),
      .indexer = reference::indexer_kernels(),
      .candidate_merge = reference::candidate_merge_kernels(),
      .sparse_core = reference::sparse_core_kernels(),
      .value = reference::value_kernels(),
      .gate = reference::gate_kernels(),
      .partial_merge = reference::partial_merge_kernels(),
  };
  return backend;
}

}  // namespace dsacore
