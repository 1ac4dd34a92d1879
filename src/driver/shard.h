// Shards a whole layer and step for one rank of DCP (spec 7): its heads' weights are views of the whole ones, its gates
// are cut from the projected rows, its tokens move into caches of their own over local indices, its slots follow them.
#pragma once

#include <vector>

#include "driver/inputs.h"
#include "format/paging.h"
#include "memory/aligned_bytes.h"

namespace dsacore {

/// Inputs of one rank, and what of them is not borrowed from the whole.
struct Shard {
  Inputs inputs;
  std::vector<AlignedBytes> storage;
};

/// The whole must have passed `check_inputs`, and the ranks divide its heads. Page 0 of the new caches belongs to no
/// request; whatever no token owns holds 0xFF.
Shard shard(const Inputs& whole, const RankShard& rank);

}  // namespace dsacore
