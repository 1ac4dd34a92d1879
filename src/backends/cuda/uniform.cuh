// Values that are the same in all lanes of a warp.
#pragma once

namespace dsacore::cuda {

/// Such a value: behind this the compiler knows. Collective operations in branches on it then cost no check that the
/// lanes are together, and what follows from it stays in uniform registers, out of loops. All lanes must call.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

/// The thread's warp in its CTA.
__device__ __forceinline__ int uniform_warp() { return uniform(int(threadIdx.x) / 32); }

}  // namespace dsacore::cuda
