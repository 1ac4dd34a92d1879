#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

ScoresKernel scores_kernel_mxfp4(int width) { return scores_kernel_of<Mxfp4Keys>(width); }

}  // namespace dsacore::cuda
