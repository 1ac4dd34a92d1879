// Loads of weights: constant, read once a step, so they pass by L1 and may run before the wait for earlier kernels.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// 16 bytes; L2 fetches the whole line, whose rest is asked for soon.
__device__ __forceinline__ uint4 load_weights16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
/// 4 bytes.
__device__ __forceinline__ uint32_t load_weights4(const void* from) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

}  // namespace dsacore::cuda
