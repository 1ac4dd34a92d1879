#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {
namespace {

// One row at a time is bound by memory: few threads, so that the next kernel finds room beside it. Two rows are
// multiplied together, and the more threads, the more of their latency is hidden.
template <int N>
ScoresInstance of_width(int q) {
  return q == 1 ? scores_instance<Fp8Keys, N, 1, 1, 2>() : scores_instance<Fp8Keys, N, 1, 2, 4>();
}

}  // namespace

ScoresInstance scores_fp8(int heads, int q) {
  const int width = score_width(heads);
  if (score_passes(heads) == 2) {
    return width == 24 ? scores_instance<Fp8Keys, 24, 2, 1, 4>() : scores_instance<Fp8Keys, 32, 2, 1, 4>();
  }
  switch (width) {
    case 8: return of_width<8>(q);
    case 16: return of_width<16>(q);
    case 24: return of_width<24>(q);
    default: return of_width<32>(q);
  }
}

}  // namespace dsacore::cuda
