// The score kernels by format; each format is compiled in a file of its own.
#pragma once

#include "backends/cuda/scores_plan.h"

namespace dsacore::cuda {

using ScoresKernel = void (*)(ScoresParameters);

/// The kernel for products of `width` heads: 8, 16, 24 or 32.
ScoresKernel scores_kernel_fp8(int width);
ScoresKernel scores_kernel_mxfp4(int width);

}  // namespace dsacore::cuda
