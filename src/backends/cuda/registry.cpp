#include "backends/cuda/check_inputs.h"
#include "backends/cuda/kernels.h"

namespace dsacore {
namespace {

constexpr Kernel<NormArgs> kNormKernels[] = {
    {"rows", [](const ShapeKey&) { return Verdict{}; }, [](const ShapeKey&, int) { return int64_t(0); },
     [](const NormArgs& args, const Workspace& workspace) {
       cuda::enqueue_query_norm({args.model, args.projected, {}, {}, args.q_c, {}}, workspace);
     }}};

}  // namespace

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
                                  .norm = kNormKernels,
                                  .pad = cuda::enqueue_pad,
                                  .check_inputs = cuda::enqueue_input_check,
                                  .offence_of = cuda::offence_of,
                                  .alignment = 16};
  return backend;
}

}  // namespace dsacore
