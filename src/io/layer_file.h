// Layer files (spec 8): a layer's weights and constants. file -> mapping -> LayerConfig, LayerWeights for
// PreparedLayer.
#pragma once

#include <string>

#include "dsacore/problem.h"
#include "io/file_fields.h"
#include "io/safetensors.h"

namespace dsacore {

/// A layer as its file holds it. The weights are borrowed from `file`, also after a move.
struct LayerFile {
  LayerConfig config;
  LayerWeights weights;
  LayerSizes sizes;
  UnknownFields unknown;
  SafetensorsFile file;
};

/// Reads a layer file of version 1. Types and shapes are checked against each other and topk against its range; the
/// ranges of the rest are prepare's. Throws `kIo`, `kMalformedFile` or `kRefused`, naming the file, the tensor or key,
/// its value and what is allowed.
LayerFile read_layer_file(const std::string& path);
/// The same for a file that is open or in memory.
LayerFile parse_layer_file(SafetensorsFile file);

/// Writes a layer file of version 1; the weights must have the shapes of spec 8. Throws `kIo`.
void write_layer_file(const std::string& path, const LayerConfig& config, const LayerWeights& weights);

}  // namespace dsacore
