// The sparse core's kernels, each in files of its own; sparse_core.cu is the list.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/registry.h"

namespace dsacore::cuda {

extern const Kernel<SparseCoreArgs> kFewHeads;   ///< sparse_core_few.cu: fastest for up to 16 heads, or few rows
extern const Kernel<SparseCoreArgs> kManyHeads;  ///< sparse_core_many.cu: for more

/// Heads that a core attends with: those of all ranks.
inline int core_heads(const ShapeKey& shape) { return shape.sizes.heads * shape.ranks; }

/// The largest `of(rows)` for any number of live rows: a core cuts keys by it, and its scratch is to be enough for all.
template <class Of>
int64_t most_of_rows(const ShapeKey& shape, Of of) {
  int64_t most = 0;
  for (int rows = 1; rows <= shape.rows; ++rows) most = std::max(most, int64_t(of(rows)));
  return most;
}

}  // namespace dsacore::cuda
