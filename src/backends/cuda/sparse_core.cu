// The list of the sparse core's kernels, in order of preference.
#include "backends/cuda/kernels.h"
#include "backends/cuda/sparse_core_kernels.h"

namespace dsacore::cuda {

std::span<const Kernel<SparseCoreArgs>> sparse_core_kernels() {
  static const Kernel<SparseCoreArgs> kernels[] = {kFewHeads, kManyHeads};
  return kernels;
}

}  // namespace dsacore::cuda
