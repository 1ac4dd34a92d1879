// Kernels of the layer's tests: one that spoils tensors in the chain of a step, and a sparse core that is held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "plan/registry.h"

namespace dsacore::test {

/// Bytes to spoil.
struct Spoiled {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};
inline constexpr int kMostSpoiled = 12;

/// Enqueues a kernel of the chain (it waits, and lets the next one start early) that fills up to `kMostSpoiled` tensors
/// with 0xFF.
void enqueue_poison(std::span<const Spoiled> tensors, Queue queue);

/// A sparse core that reads its query, rows and counts before its wait, so that it may not start early. Its latent and
/// lse are a mix of what it read, not attention: equal bits mean that it read the right bytes.
std::span<const Kernel<SparseCoreArgs>> held_cores();

}  // namespace dsacore::test
