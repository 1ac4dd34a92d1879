// The index front from q_c.
#include "backends/cuda/index_projection_kernels.h"
#include "backends/cuda/index_projection_launch.cuh"

namespace dsacore::cuda {

void run_front_from_q_c(const IndexProjectionArgs& args, const Workspace& workspace) {
  run_front_kernel<StoredActivations>(args, workspace);
}
void prepare_front_from_q_c(const ShapeKey&) { prepare_front_kernel<StoredActivations>(); }

}  // namespace dsacore::cuda
