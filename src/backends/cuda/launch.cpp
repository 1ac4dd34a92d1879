#include "backends/cuda/launch.h"

namespace dsacore::cuda {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the error is ours now
  throw Exception({ErrorCode::kDevice, call, cudaGetErrorName(error), cudaGetErrorString(error)});
}

void allow_shared(const void* kernel, size_t shared_bytes, bool wide_clusters) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
        "cudaFuncSetAttribute");
  if (wide_clusters) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  }
}

}  // namespace dsacore::cuda
