// The index front from the packed row.
#include "backends/cuda/index_projection_kernels.h"
#include "backends/cuda/index_projection_launch.cuh"

namespace dsacore::cuda {

void run_front(const IndexProjectionArgs& args, const Workspace& workspace) {
  run_front_kernel<NormalisedActivations, OneRowActivations>(args, workspace);
}
void prepare_front(const ShapeKey&) { prepare_front_kernel<NormalisedActivations, OneRowActivations>(); }

}  // namespace dsacore::cuda
