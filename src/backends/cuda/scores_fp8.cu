#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

ScoresInstance scores_fp8(int heads, int q, bool is_short) { return scores_of<Fp8Keys>(heads, q, is_short); }

}  // namespace dsacore::cuda
