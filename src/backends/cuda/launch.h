// How kernels are enqueued: with programmatic dependent launch, in clusters or not, on the workspace's stream. Host
// side.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "dsacore/status.h"
#include "plan/registry.h"

namespace dsacore::cuda {

/// SMs of the chip that plans are made for (H100 SXM, H200): with fewer they are slower, never wrong.
inline constexpr int kMultiprocessors = 132;
/// Of an SM's shared memory: what a CTA may take alone, and at most where another CTA is to fit beside it.
inline constexpr int kWholeOfShared = 227 * 1024, kHalfOfShared = 113 * 1024;

/// Throws `kDevice` naming the call where it failed.
void check(cudaError_t error, const char* call);

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  ///< dynamic
  int cluster = 1;          ///< CTAs along x
};

/// Enqueues a kernel that may start before the kernel ahead of it on the stream has ended (unless the workspace says
/// no): its code must wait (ptx/dependency.cuh) before it touches anything that an earlier kernel wrote or still reads.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, const Workspace& workspace,
            Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = workspace.early_start ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(workspace.queue.stream);
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...),
        "cudaLaunchKernelEx");
}

/// Lets a kernel take `shared_bytes` of dynamic shared memory, and clusters above 8 CTAs where it wants them. For a
/// stage's `prepare`, never for its `run`.
void allow_shared(const void* kernel, size_t shared_bytes, bool wide_clusters = false);
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), size_t shared_bytes, bool wide_clusters = false) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes, wide_clusters);
}

/// Has an SM that runs the kernel give shared memory all it can: else it gives what the kernel's own CTAs can use, and
/// those of another kernel find no room beside them. For a stage's `prepare`.
void prefer_shared(const void* kernel);
template <class... Parameters>
void prefer_shared(void (*kernel)(Parameters...)) {
  prefer_shared(reinterpret_cast<const void*>(kernel));
}

}  // namespace dsacore::cuda
