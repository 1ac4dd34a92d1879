#include "backends/cuda/launch.h"

namespace dsacore::cuda {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the error is ours now
  throw Exception({ErrorCode::kDevice, call, cudaGetErrorName(error), cudaGetErrorString(error)});
}

void allow_shared(const void* kernel, size_t shared_bytes, bool wide_clusters) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (error != cudaSuccess) {
    cudaGetLastError();
    const char* name = "a kernel";
    cudaFuncGetName(&name, kernel);
    throw Exception({ErrorCode::kDevice, std::string("shared memory of ") + name,
                     std::to_string(shared_bytes) + " bytes", cudaGetErrorString(error)});
  }
  if (wide_clusters) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  }
}

void prefer_shared(const void* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
}

}  // namespace dsacore::cuda
