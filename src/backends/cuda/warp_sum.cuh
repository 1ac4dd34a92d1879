// Sums over the lanes of a warp, up to each.
#pragma once

namespace dsacore::cuda {

/// The sum of the values of the lanes up to this one, its own included.
__device__ __forceinline__ int sum_up_to_lane(int value) {
  const int lane = int(threadIdx.x) % 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

}  // namespace dsacore::cuda
