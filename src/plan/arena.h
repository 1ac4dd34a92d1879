// ScratchArena: named buffers that all layers of a context share. Layers book at prepare, when nothing runs; a buffer
// grows to its largest booking and keeps its record's address, so that layers prepared earlier follow it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dsacore/layer.h"
#include "memory/aligned_bytes.h"

namespace dsacore {

class ScratchArena {
 public:
  /// Makes the buffer `name` hold at least `bytes`; what it held before is lost.
  const AlignedBytes* book(const std::string& name, int64_t bytes);
  std::vector<ReservedItem> items() const;

 private:
  std::map<std::string, std::unique_ptr<AlignedBytes>> buffers_;
};

}  // namespace dsacore
