// Writer of safetensors files. Tensors are laid out as the oracle's save_safetensors lays them: by element size,
// largest first, then by name; metadata by key. So equal contents give equal bytes, whoever wrote them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/tensor_view.h"

namespace dsacore {

struct NamedTensor {
  std::string name;
  TensorView view;  ///< absent ones are left out
};

using FileMetadata = std::map<std::string, std::string, std::less<>>;

/// Streams the tensors into a temporary file beside `path` and renames it at the end: `path` is whole or untouched.
/// Where `path` is no regular file (a pipe, /dev/null) it is written in place. Throws `kIo` with the system's reason,
/// e.g. a full disk.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const FileMetadata& metadata);

}  // namespace dsacore
