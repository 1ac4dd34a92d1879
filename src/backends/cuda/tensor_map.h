// Tensor maps: how the copy engine fetches a box of a matrix of BF16 values into shared memory, swizzled. Host side.
#pragma once

#include <cuda.h>

#include "dsacore/formats.h"

namespace dsacore::cuda {

/// Of a `rows` x `columns` matrix whose rows lie `pitch` elements apart (base and pitch multiples of 16 bytes): boxes
/// of `box_rows` x 64 values, rows of 128 bytes with wgmma's 128-byte swizzle (ptx/wgmma.cuh). Rows past the matrix are
/// zeros.
CUtensorMap tensor_map(const BFloat16* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows);

inline constexpr int kBoxColumns = 64;

}  // namespace dsacore::cuda
