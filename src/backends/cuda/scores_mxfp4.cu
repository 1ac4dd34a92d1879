#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

ScoresInstance scores_mxfp4(int heads, int q, bool is_short) { return scores_of<Mxfp4Keys>(heads, q, is_short); }

}  // namespace dsacore::cuda
