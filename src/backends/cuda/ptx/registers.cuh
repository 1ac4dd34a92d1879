// Registers moved between the warpgroups of a CTA: each whole warpgroup calls it, those that give first.
#pragma once

namespace dsacore::cuda {

/// Keeps `Count` registers a thread, a multiple of 8, and gives the others back to the CTA.
template <int Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

/// Waits until the CTA has registers for `Count` a thread.
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace dsacore::cuda
