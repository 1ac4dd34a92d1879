// The sparse core's kernels, each in files of its own; sparse_core.cu is the list.
#pragma once

#include "plan/registry.h"

namespace dsacore::cuda {

extern const Kernel<SparseCoreArgs> kFewHeads;   ///< sparse_core_few.cu: fastest for up to 16 heads, or few rows
extern const Kernel<SparseCoreArgs> kManyHeads;  ///< sparse_core_many.cu: for more

}  // namespace dsacore::cuda
