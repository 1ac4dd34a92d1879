#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

ScoresInstance scores_mxfp4(int heads, int, bool) {
  const int width = score_width(heads);
  if (score_passes(heads) == 2) {
    return width == 24 ? scores_instance<Mxfp4Keys, 24, 2, 1, 3>() : scores_instance<Mxfp4Keys, 32, 2, 1, 3>();
  }
  switch (width) {
    case 8: return scores_instance<Mxfp4Keys, 8, 1, 1, 3>();
    case 16: return scores_instance<Mxfp4Keys, 16, 1, 1, 3>();
    case 24: return scores_instance<Mxfp4Keys, 24, 1, 1, 3>();
    default: return scores_instance<Mxfp4Keys, 32, 1, 1, 3>();
  }
}

}  // namespace dsacore::cuda
