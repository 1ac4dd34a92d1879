// Named barriers of a CTA (ids 1 to 15; 0 is __syncthreads): threads that only arrive, threads that meet, and a vote.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// Counts this thread in and goes on; its writes are visible to those who meet there.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Waits until `threads` (of whole warps) have arrived or met.
__device__ __forceinline__ void barrier_meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Meets, and returns whether any thread said yes.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool yes) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.or.pred p, %2, %3, q;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(any)
               : "r"(uint32_t(yes)), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

}  // namespace dsacore::cuda
