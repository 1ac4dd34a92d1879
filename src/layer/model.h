// Checks a layer's configuration and weights (spec 10) and turns them into the model that the stages see.
#pragma once

#include <memory>

#include "stages/model.h"

namespace dsacore {

/// A LayerModel and the FP32 copies of the index key norm that it refers to.
struct OwnedModel {
  LayerModel model;
  std::unique_ptr<float[]> k_norm;  ///< weight [128], then bias [128]
};

/// Throws `kRefused` naming the tensor or constant, its value and what is allowed.
OwnedModel make_model(const LayerConfig& config, const LayerWeights& weights);

}  // namespace dsacore
