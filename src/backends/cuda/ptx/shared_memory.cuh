// Shared memory by address, mbarriers and the copy engine that completes on them (PTX ISA 8, sm_90).
#pragma once

#include <cstdint>

namespace dsacore::cuda {

/// The 32-bit address of a shared variable.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// The same behind an opaque move: without it the compiler rebuilds the address before every use in a branch.
__device__ __forceinline__ uint32_t fixed_shared_address(const void* p) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(shared_address(p)));
  return address;
}

/// A pointer to a shared variable by such an address.
template <class T>
__device__ __forceinline__ T* fixed_shared(T* p) {
  return static_cast<T*>(__cvta_shared_to_generic(fixed_shared_address(p)));
}

/// One lane of a converged warp. Only under it are bulk copies issued without a loop over the lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

/// An mbarrier in shared memory, by address. `arrivals` arrivals and all announced bytes complete a phase.
struct Barrier {
  uint32_t address;

  __device__ __forceinline__ void init(uint32_t arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }
  /// Arrives and announces bytes that copies will bring.
  __device__ __forceinline__ void expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  /// Waits until the phase of this parity (0 for the first) has completed.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                   : "=r"(done)
                   : "r"(address), "r"(parity)
                   : "memory");
    }
  }
};

/// Makes initialised barriers visible to the copy engine and to the cluster; before the CTA's or cluster's barrier.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Copies `bytes` (a multiple of 16, both ends 16-byte aligned) from global to shared memory; completes on `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t to_shared, const void* from, uint32_t bytes, Barrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_shared),
      "l"(from), "r"(bytes), "r"(barrier.address)
      : "memory");
}

/// Asks for `bytes` (a multiple of 16) in L2; changes nothing, so that it may run before the wait for earlier kernels.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/// The same for the line that `from` lies in, at any address.
__device__ __forceinline__ void prefetch_line_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

/// Orders this thread's earlier writes to shared memory before later reads of them by wgmma and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// 16 or 4 bytes from global to shared memory (cp.async); `async_commit` closes a group, `async_wait<N>` leaves N open.
__device__ __forceinline__ void async_copy16(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void async_copy4(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Open>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Open) : "memory");
}

}  // namespace dsacore::cuda
