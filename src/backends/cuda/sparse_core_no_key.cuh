// What stands in a tile of the sparse core where there is no key.
#pragma once

#include <algorithm>
#include <cstddef>

#include "format/layouts.h"

namespace dsacore::cuda {

/// Rows of zeros: p is 0 there, and 0 * NaN is not. Like cache rows they come by bulk copy, so that a tile has no other
/// writer than the copy engine, and its barrier is all that there is to wait for. One a lane: a single one would be a
/// place that all SMs read at once.
__device__ alignas(
    16) const std::byte kNoKey[32][std::max({KvFp8DsMla::kRowBytes, KvFp8::kRowBytes, KvNvfp4DsMla::kRowBytes})] = {};

}  // namespace dsacore::cuda
