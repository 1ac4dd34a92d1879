// Programmatic dependent launch (kernels.md 7). Before `wait_for_earlier_kernels` a kernel reads nothing but weights,
// constants and its own shared memory, and writes nothing but that; every CTA of every kernel calls it before it exits
// (of the selection in pieces one for all), so that a kernel that has ended has all before it ended. A kernel that runs
// beside the stage ahead of it (Workspace) waits at its end alone. Behind a kernel that lets it start after its own
// wait, all before that one has ended: what that kernel itself does not write may be read at once (scores and
// selection: lengths, tables, the keys of earlier steps).
#pragma once

namespace dsacore::cuda {

/// Returns when every earlier kernel of the stream has completed and its writes are visible.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Lets the next kernel of the stream start, once all CTAs have called it; publishes nothing. Before the wait: the next
/// kernel's weights travel while this one still waits. After it: the next kernel starts when all before this one has
/// ended.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace dsacore::cuda
