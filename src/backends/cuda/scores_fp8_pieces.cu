#include "backends/cuda/scores_pieces.cuh"

namespace dsacore::cuda {
namespace {

template <int N>
constexpr ScoresInstance instance() {
  using Tile = PiecesTile<N>;
  return {scores_in_pieces<Fp8Keys, Tile>, Tile::kThreads, Tile::kGroups};
}

}  // namespace

ScoresInstance scores_fp8_in_pieces(int heads) {
  switch (score_width(heads)) {
    case 8: return instance<8>();
    case 16: return instance<16>();
    case 24: return instance<24>();
    default: return instance<32>();
  }
}

}  // namespace dsacore::cuda
