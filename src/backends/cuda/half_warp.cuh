// What the 16 lanes of a half warp agree on.
#pragma once

namespace dsacore::cuda {

__device__ __forceinline__ float half_warp_max(float x) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  return x;
}
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
  return x;
}

}  // namespace dsacore::cuda
