// Checks a layer's configuration and weights (spec 10) and turns them into the model that the stages see.
#pragma once

#include "dsacore/status.h"
#include "memory/memory.h"
#include "stages/model.h"

namespace dsacore {

/// A LayerModel and the FP32 copies of the index key norm that it refers to.
struct OwnedModel {
  LayerModel model;
  MemoryBlock k_norm;  ///< F32: weight [128], then bias [128]
};

/// Throws `kRefused` naming the tensor or constant, its value and what is allowed. The weights lie in `memory`,
/// at multiples of `alignment` bytes.
OwnedModel make_model(const LayerConfig& config, const LayerWeights& weights, Memory& memory = host_memory(),
                      int alignment = 1);

/// `kRefused` naming the argument where it does not begin at a multiple of `alignment` bytes.
Status check_address(const char* argument, const void* data, size_t alignment);

}  // namespace dsacore
