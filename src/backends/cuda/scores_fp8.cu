#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {
namespace {

// One row at a time is bound by memory where there is much to read, and else by latency: then few threads leave the
// next kernel room to start beside them. Two rows are multiplied together, and the more threads, the more of their
// latency is hidden.
template <int N>
ScoresInstance of_width(int q, bool is_short) {
  if (q > 1) return scores_instance<Fp8Keys, N, 1, 2, 4>();
  return is_short ? scores_instance<Fp8Keys, N, 1, 0, 2>() : scores_instance<Fp8Keys, N, 1, 0, 4>();
}

}  // namespace

ScoresInstance scores_fp8(int heads, int q, bool is_short) {
  const int width = score_width(heads);
  if (score_passes(heads) == 2) {
    return width == 24 ? scores_instance<Fp8Keys, 24, 2, 1, 4>() : scores_instance<Fp8Keys, 32, 2, 1, 4>();
  }
  switch (width) {
    case 8: return of_width<8>(q, is_short);
    case 16: return of_width<16>(q, is_short);
    case 24: return of_width<24>(q, is_short);
    default: return of_width<32>(q, is_short);
  }
}

}  // namespace dsacore::cuda
