// How long L2 keeps what an access brings there (PTX ISA 7.4, createpolicy), and the accesses that say so.
//
// A step reads far more than L2 holds, and nearly all of it once: weights, cache rows, pages of keys. Let these go
// first, and what one kernel leaves for the next stays; else much of it is written to memory and read from there.
#pragma once

#include "backends/cuda/ptx/shared_memory.cuh"

namespace dsacore::cuda {

/// Of what is read once in a step: the first to go.
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

__device__ __forceinline__ void store_read_soon(uint32_t* to, uint32_t value) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(value), "l"(read_soon()) : "memory");
}

/// `bulk_copy` and `async_copy16` (shared_memory.cuh) of what is read once.
__device__ __forceinline__ void bulk_copy_once(uint32_t to_shared, const void* from, uint32_t bytes, Barrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to_shared),
      "l"(from), "r"(bytes), "r"(barrier.address), "l"(read_once())
      : "memory");
}
__device__ __forceinline__ void async_copy16_once(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "l"(read_once())
               : "memory");
}

}  // namespace dsacore::cuda
