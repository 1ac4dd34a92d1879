// Warpgroup matrix products (wgmma, sm_90a): WgmmaShape<types, N> multiplies a 64 x K tile of A by a K x N tile of B
// into N / 2 FP32 registers a thread, K = 16 for 16-bit operands and 32 for FP8. A comes from shared memory or from
// registers.
//
// Accumulator of thread t of the warpgroup: d[4 j + 2 i + e] is row 16 (t / 32) + 8 i + t % 32 / 4,
// column 8 j + 2 (t % 4) + e.
#pragma once

#include "backends/cuda/ptx/wgmma_shapes.cuh"

namespace dsacore::cuda {

/// Descriptor of an operand tile with 128-byte swizzle: rows of 128 bytes in groups of 8 that lie `group_bytes` (1024
/// where dense) apart, tiles aligned to 1024 bytes; byte b of row r lies at r * 128 + (b ^ (r % 8) * 16). The next
/// k-step of a K-major operand is 32 bytes on: add 2. `leading_bytes` is read for MN-major tiles wider than 64 elements
/// only.
__device__ __forceinline__ uint64_t swizzled_tile(uint32_t shared_address, uint32_t group_bytes = 1024,
                                                  uint32_t leading_bytes = 16) {
  return uint64_t((shared_address & 0x3FFFF) >> 4) | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t(group_bytes >> 4) << 32 | uint64_t(1) << 62;
}

/// Orders register and shared-memory writes of this warpgroup before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `Open` committed groups are still running.
template <int Open>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
}

/// After the wait, before plain code reads the accumulators: without it the compiler may read them too early.
template <int Count>
__device__ __forceinline__ void wgmma_settle(float (&d)[Count]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}

}  // namespace dsacore::cuda
