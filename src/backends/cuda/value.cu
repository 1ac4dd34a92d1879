#include "backends/cuda/kernels.h"

static_assert(__cplusplus >= 202002L);

namespace dsacore::cuda {

std::span<const Kernel<ValueArgs>> value_kernels() { return {}; }

}  // namespace dsacore::cuda
