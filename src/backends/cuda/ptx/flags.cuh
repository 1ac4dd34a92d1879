// Counters in memory by which kernels that run at once hand over what they wrote (PTX ISA 8, memory consistency), and
// lines that are given up.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// Adds `value`. Whoever awaits the sum sees what this thread wrote before, and what others did before a barrier that
/// it has met them at.
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// Returns when the counter is `value`: what was released with it is there, for the copy engine too.
__device__ __forceinline__ void await_acquire(const uint32_t* at, uint32_t value) {
  while (true) {
    uint32_t seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
    if (seen == value) break;
    __nanosleep(100);
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// Gives up the 128 bytes from `line` on, which is a multiple of them: L2 need not write them to memory, and what they
/// hold is undefined until they are written.
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

}  // namespace dsacore::cuda
