#include "backends/cuda/kernels.h"

namespace dsacore {

const Backend& cuda_backend() {
  static const Backend backend = {.name = "cuda",
                                  .target = "sm_90a",
                                  .target_data = nullptr,
                                  .packed_bytes = [](const LayerSizes&) { return int64_t(0); },
                                  .pack = [](const LayerModel&, std::byte*, Threads&) {},
                                  .query = cuda::query_kernels(),
                                  .index_projection = cuda::index_projection_kernels(),
                                  .indexer = cuda::indexer_kernels(),
                                  .candidate_merge = {},
                                  .sparse_core = cuda::sparse_core_kernels(),
                                  .value = cuda::value_kernels(),
                                  .gate = cuda::gate_kernels(),
                                  .partial_merge = {},
                                  .norm = cuda::norm_kernels(),
                                  .pad = cuda::enqueue_pad};
  return backend;
}

}  // namespace dsacore
