// How long L2 keeps what an access brings there (PTX ISA 7.4, createpolicy).
#pragma once

#include "backends/cuda/ptx/shared_memory.cuh"

namespace dsacore::cuda {

/// Of what is read once: the first to go.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// Of what the next kernel reads: the last to go.
__device__ __forceinline__ uint64_t read_soon() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store(uint32_t* to, uint32_t value, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(value), "l"(policy) : "memory");
}
/// As `bulk_copy` without a policy.
__device__ __forceinline__ void bulk_copy(uint32_t to_shared, const void* from, uint32_t bytes, Barrier barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to_shared),
      "l"(from), "r"(bytes), "r"(barrier.address), "l"(policy)
      : "memory");
}

}  // namespace dsacore::cuda
