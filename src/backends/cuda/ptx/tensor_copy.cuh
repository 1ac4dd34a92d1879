// Copies of boxes described by a tensor map (tensor_map.h), which lies in a kernel's __grid_constant__ parameter.
#pragma once

#include <cuda.h>

#include "backends/cuda/ptx/cache_policy.cuh"

namespace dsacore::cuda {

/// The box that begins at (column, row) into shared memory (a multiple of 1024 for swizzled ones); completes on
/// `barrier` with the bytes of a whole box.
__device__ __forceinline__ void tensor_copy(uint32_t to_shared, const CUtensorMap& map, int column, int row,
                                            Barrier barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to_shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier.address)
      : "memory");
}

/// The same of what is read once in a step (cache_policy.cuh).
__device__ __forceinline__ void tensor_copy_once(uint32_t to_shared, const CUtensorMap& map, int column, int row,
                                                 Barrier barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to_shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier.address), "l"(read_once())
      : "memory");
}

/// Asks for a box in L2; changes nothing, so that it may run before the wait for earlier kernels.
__device__ __forceinline__ void prefetch_box_l2(const CUtensorMap& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}
/// Fetches the map itself, which the first copy would otherwise wait for.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace dsacore::cuda
