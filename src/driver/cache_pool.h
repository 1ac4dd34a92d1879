// CachePool: contents for caches too large to be made on the host. A pool of pages as earlier steps would have left
// them is made once; a cache is filled with copies of them where it lies, each copy different in low bits
// (page_spread.h).
#pragma once

#include <optional>

#include "driver/inputs.h"
#include "io/generate.h"
#include "memory/memory.h"

namespace dsacore {

class CachePool {
 public:
  static constexpr int kPages = 1024;  ///< of 64 tokens

  /// Fills the caches of `placed`, which lie in `memory` without rows between their pages, for a layer of the case that
  /// `shape` makes. `number`: another one, another order of pages.
  void fill(const CaseOptions& shape, const Inputs& placed, Memory& memory, uint64_t number);

 private:
  const Case& pages_of(const CaseOptions& shape);

  CaseOptions made_for_;
  std::optional<Case> pages_;  ///< of the last shape; kept for the next, which often has the same formats
};

}  // namespace dsacore
