// Programmatic dependent launch (kernels.md 7). Before `wait_for_earlier_kernels` a kernel reads nothing but weights,
// constants and its own shared memory, and writes nothing but that; every CTA of every kernel calls it before it exits.
#pragma once

namespace dsacore::cuda {

/// Returns when every earlier kernel of the stream has completed and its writes are visible.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Lets the next kernel of the stream start; publishes nothing. Call it after the wait, when all CTAs are resident.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace dsacore::cuda
