#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

ScoresKernel scores_kernel_fp8(int width) { return scores_kernel_of<Fp8Keys>(width); }

}  // namespace dsacore::cuda
