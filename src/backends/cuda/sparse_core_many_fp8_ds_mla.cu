#include "backends/cuda/sparse_core_many_kernel.cuh"

template struct dsacore::cuda::ManyHeadsKernel<dsacore::KvFp8DsMla>;
