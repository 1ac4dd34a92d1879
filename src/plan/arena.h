// ScratchArena: named buffers that all layers of a context share. Layers book at prepare, when nothing runs; a buffer
// grows to its largest booking and keeps its record's address, so that layers prepared earlier follow it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dsacore/layer.h"
#include "memory/memory.h"

namespace dsacore {

class ScratchArena {
 public:
  explicit ScratchArena(Memory& memory) : memory_(memory) {}

  /// Makes the buffer `name` hold at least `bytes`. Where it has to grow, it is zeroed and what it held is lost.
  const MemoryBlock* book(const std::string& name, int64_t bytes);
  /// Bytes by which the buffer `name` would have to grow.
  int64_t missing(const std::string& name, int64_t bytes) const;
  std::vector<ReservedItem> items() const;

 private:
  Memory& memory_;
  std::map<std::string, std::unique_ptr<MemoryBlock>> buffers_;
};

}  // namespace dsacore
