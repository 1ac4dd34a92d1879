// Strong integer types for the words of spec 1. They convert neither into each other nor from raw integers by
// themselves; only src/format/paging.h turns one into another. Each has the size of its raw integer, so arrays of
// either alias.
#pragma once

#include <cstdint>

#include "dsacore/host_device.h"

namespace dsacore {

/// An integer that knows what it counts. `Tag` only tells types apart.
template <class Tag, class Raw>
class StrongId {
 public:
  constexpr StrongId() = default;
  DSACORE_HD constexpr explicit StrongId(Raw value) : value_(value) {}
  DSACORE_HD constexpr Raw value() const { return value_; }

  friend DSACORE_HD constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend DSACORE_HD constexpr bool operator<(StrongId a, StrongId b) { return a.value_ < b.value_; }

 private:
  Raw value_ = 0;
};

/// Position of a key in its request, 0-based, global (before sharding over ranks).
using TokenId = StrongId<struct TokenIdTag, int32_t>;
/// Position of an owned key among the keys that a rank holds of its request (spec 7); equals the token id at D = 1.
using LocalId = StrongId<struct LocalIdTag, int32_t>;
/// A page of the MLA cache (`P` rows) or of the index cache (64 rows).
using PageId = StrongId<struct PageIdTag, int32_t>;
/// `page * P + offset`: where a new row is written; negative: nowhere.
using Slot = StrongId<struct SlotTag, int64_t>;
/// `page * stride_rows + offset`: a cache row as the sparse core addresses it; -1 past the valid ones.
using PhysicalRow = StrongId<struct PhysicalRowTag, int32_t>;

static_assert(sizeof(TokenId) == 4 && sizeof(Slot) == 8 && sizeof(PhysicalRow) == 4);

}  // namespace dsacore
