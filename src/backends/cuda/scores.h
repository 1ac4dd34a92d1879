// The score kernels by format; each format is compiled in a file of its own.
#pragma once

#include "backends/cuda/scores_plan.h"

namespace dsacore::cuda {

struct ScoresInstance {
  void (*kernel)(ScoresParameters);
  int threads;
  int groups;  ///< math warpgroups
};

/// The instance for `heads` index heads and q rows a request; `is_short`: a CTA has few pages to score.
ScoresInstance scores_fp8(int heads, int q, bool is_short);
ScoresInstance scores_mxfp4(int heads, int q, bool is_short);
/// For one row a request and heads in one pass (scores_pieces.cuh).
ScoresInstance scores_fp8_in_pieces(int heads);

}  // namespace dsacore::cuda
