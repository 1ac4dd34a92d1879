// Thread block clusters: ranks, barrier, and the shared memory of the neighbours.
#pragma once

#include <cstdint>

namespace dsacore::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// The two halves of the barrier: every thread arrives, and later waits for all threads of the cluster to have arrived.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// All threads of all CTAs of the cluster meet; what they wrote before is visible after.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The address that a shared variable at `address` has in CTA `rank` of the cluster (for .shared::cluster accesses).
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/// Stores to a shared variable of any CTA of the cluster, at an address from `address_in`.
__device__ __forceinline__ void store_in_cluster(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

}  // namespace dsacore::cuda
