#include "backends/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "backends/cuda/launch.h"

namespace dsacore::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// From the driver by way of the runtime: the library does not link libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw Exception({ErrorCode::kDevice, "cuTensorMapEncodeTiled", "not found", "a driver for CUDA 12 or later"});
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap tensor_map(const BFloat16* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  static const Encode encode = find_encode();
  CUtensorMap map;
  const cuuint64_t extents[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t pitch_bytes[] = {cuuint64_t(pitch) * 2};
  const cuuint32_t box[] = {kBoxColumns, cuuint32_t(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<BFloat16*>(data), extents,
                                 pitch_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Exception(
        {ErrorCode::kDevice, "cuTensorMapEncodeTiled", std::to_string(int(result)), "addresses at multiples of 16"});
  }
  return map;
}

}  // namespace dsacore::cuda
