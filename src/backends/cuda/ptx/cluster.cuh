// Thread block clusters: ranks, barrier, and the shared memory of the neighbours.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/shared_memory.cuh"

namespace dsacore::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// The two halves of `cluster_barrier`, with work in between. The relaxed arrival orders nothing (a release waits for
/// all loads and stores before it): enough where `publish_barriers` has made all ready that the others need.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// All threads of all CTAs of the cluster meet; what they wrote before is visible after.
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

/// The address that a shared variable at `address` has in CTA `rank` of the cluster (for .shared::cluster accesses).
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/// Stores 16, 8 or 4 bytes in a CTA of the cluster and counts them on a barrier of the same CTA; both by `address_in`.
__device__ __forceinline__ void send_to_cluster(uint32_t to, const uint4& v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send_to_cluster(uint32_t to, const float4& v, uint32_t barrier) {
  send_to_cluster(to, uint4{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)},
                  barrier);
}
__device__ __forceinline__ void send_to_cluster(uint32_t to, const float2& v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send_to_cluster(uint32_t to, float v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
}
/// Copies `bytes` of shared memory to another CTA of the cluster and counts them on its barrier.
__device__ __forceinline__ void copy_to_cta(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Barrier::arrive on a barrier of another CTA.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Barrier::wait for what other CTAs of the cluster sent.
__device__ __forceinline__ void wait_in_cluster(Barrier barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}\n"
        : "=r"(done)
        : "r"(barrier.address), "r"(parity)
        : "memory");
  }
}
/// Stores to a shared variable of any CTA of the cluster, at an address from `address_in`.
__device__ __forceinline__ void store_in_cluster(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_in_cluster(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

}  // namespace dsacore::cuda
