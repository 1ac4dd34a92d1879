// Barriers among some of a CTA's warps.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// The `threads` threads (whole warps) that name barrier `id` (1..15; 0 is __syncthreads') meet.
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace dsacore::cuda
